// Counts of requests and of their answers, for metrics: by mode, and by the models and workers of the fleet.
#pragma once

#include <nanobind/nanobind.h>

#include "answer.hpp"
#include "core.hpp"

namespace kv {

class RequestSums {
public:
    template <typename Row>
    using ByName = std::map<std::string, Row, std::less<>>;
    static inline const std::vector<double> kSeconds{1e-3, 2.5e-3, 6e-3, 0.016, 0.04, 0.1, 0.25, 0.6, 1.6, 4, 10, 25, 60, 160};
    static inline const std::vector<double> kTokens{16, 64, 256, 1024, 4096, 16384, 65536, 262144};
    static inline const std::vector<double> kErrorTokens{-8192, -2048, -512, -128, -32, -1, 0, 32, 128, 512, 2048, 8192};
    static inline const std::vector<double> kWorkerSeconds{0.016, 0.04, 0.1, 0.25, 0.6, 1.6, 4, 10, 60};  // fewer bounds: each worker has a histogram

    struct OfMode {
        Histogram duration{kSeconds}, ttft{kSeconds}, itl{kSeconds};
    };
    struct OfModel {
        CountsByNames requests;  // by mode and outcome
        Histogram ttft{kSeconds};
    };
    struct OfWorker {
        i64 predicted_tokens = 0, actual_tokens = 0;
        Histogram error_tokens{kErrorTokens}, ttft{kWorkerSeconds};
        std::map<std::string, u64> failures;  // by phase
    };

    // `of`: a `router.fleet.registry.Fleet`. Modes `from_start` have rows at once, others once they are counted.
    RequestSums(nanobind::object of, const std::vector<std::string>& from_start) : fleet_(std::move(of)) {
        for (const std::string& mode : from_start) {
            modes.try_emplace(mode);
        }
    }

    void end(std::string_view model, std::string_view mode, std::string_view outcome, double duration_s) {
        --inflight;
        of_mode(mode).duration.add(duration_s);
        count(of_model(model).requests, mode, outcome);
    }
    void first_token(std::string_view mode, std::string_view model, std::string_view worker_id, double ttft_s) {
        of_mode(mode).ttft.add(ttft_s);
        of_model(model).ttft.add(ttft_s);
        if (OfWorker* const worker = of_worker(worker_id)) {
            worker->ttft.add(ttft_s);
        }
    }
    void answered(const Verdict& verdict, const Answer& answer, std::optional<double> itl_s) {
        const Request& request = *verdict.request;
        input_tokens.add(static_cast<double>(request.known_tokens != 0 ? request.known_tokens : answer.input_tokens.value_or(0)));
        if (answer.output_tokens.has_value()) {
            output_tokens.add(static_cast<double>(*answer.output_tokens));
        }
        if (itl_s.has_value()) {
            of_mode(verdict.policy->name).itl.add(*itl_s);
        }
        const bool is_compared = answer.cached_tokens.has_value() && request.known_tokens != 0 && request.is_prefilled;
        if (OfWorker* const worker = is_compared ? of_worker(verdict.view->standing->held[verdict.place()].key().worker_id) : nullptr) {
            const i64 predicted_tokens = verdict.overlap_blocks * request.block_size;
            worker->predicted_tokens += predicted_tokens;
            worker->actual_tokens += *answer.cached_tokens;
            worker->error_tokens.add(static_cast<double>(predicted_tokens - *answer.cached_tokens));
        }
    }
    void worker_failed(std::string_view worker_id, const std::string& phase) {
        if (OfWorker* const worker = of_worker(worker_id)) {
            ++worker->failures[phase];
        }
    }
    // Keeps rows for the fleet's models and workers only, and one for unknown models.
    void follow() {
        auto present = nanobind::cast<std::vector<std::string>>(fleet_.attr("models")());
        present.push_back(kUnknownModel);
        keep(models, present);
        follow_workers();
    }

    i64 inflight = 0;
    ByName<OfMode> modes;
    ByName<OfModel> models;
    ByName<OfWorker> workers;
    Histogram input_tokens{kTokens}, output_tokens{kTokens}, queue_wait{kSeconds};

private:
    static inline const std::string kUnknownModel = "unknown";

    template <typename Row>
    static void keep(ByName<Row>& rows, const std::vector<std::string>& present) {
        ByName<Row> kept;
        for (const std::string& name : present) {
            kept.insert(rows.extract(name));
            kept.try_emplace(name);
        }
        rows = std::move(kept);
    }
    void follow_workers() {
        std::vector<std::string> present;
        for (const nanobind::handle worker : fleet_.attr("workers")()) {
            present.push_back(nanobind::cast<std::string>(worker.attr("registration").attr("worker_id")));
        }
        keep(workers, present);
    }
    OfMode& of_mode(std::string_view name) {
        const auto known = modes.find(name);
        return known == modes.end() ? modes[std::string(name)] : known->second;
    }
    OfModel& of_model(std::string_view name) {
        const auto found = models.find(name);
        if (found != models.end()) {
            return found->second;
        }
        if (nanobind::cast<bool>(fleet_.attr("models")().attr("__contains__")(name))) {
            follow();
        }
        const auto known = models.find(name);
        return known == models.end() ? models[kUnknownModel] : known->second;
    }
    OfWorker* of_worker(std::string_view worker_id) {
        auto known = workers.find(worker_id);
        if (known == workers.end()) {
            follow_workers();
            known = workers.find(worker_id);
        }
        return known == workers.end() ? nullptr : &known->second;
    }

    nanobind::object fleet_;
};

}  // namespace kv
