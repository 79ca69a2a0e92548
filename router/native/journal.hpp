// Records of the journal that wait to be published, in messages: router/journal/encoder.py says in what order. Knows nothing of Python.
#pragma once

#include "rows.hpp"

namespace kv {

class Batches {
public:
    struct Batch {
        std::string records;  // joined
        u64 count = 0;
        u64 numbers = 0;  // records, with those that they state as lost
    };

    // Of one batch, and of all that wait: beyond it the oldest gives way.
    Batches(std::size_t batch_bytes_max, std::size_t bytes_max) : batch_bytes_max_(batch_bytes_max), bytes_max_(bytes_max) {}

    void put(std::string_view record, u64 of_numbers = 1) {
        if (newest_.numbers >= kNumbersMax || newest_.records.size() + record.size() > batch_bytes_max_) {
            complete();
            make_room();
        }
        newest_.records.append(record);
        ++newest_.count;
        newest_.numbers += of_numbers;
        ++records;
        bytes += record.size();
    }
    // Begins another batch, if the newest has a record.
    void complete() {
        if (newest_.count != 0) {
            complete_.push_back(std::move(newest_));
            newest_ = {std::move(spare_)};
            spare_.clear();
        }
    }
    // Lets the next batch have the memory of one that was read: a string that grows copies what it has.
    void reuse(std::string read) {
        read.clear();
        if (read.capacity() <= kSpareBytesMax) {
            spare_ = std::move(read);
        }
    }
    // Takes the oldest batch, or an empty one.
    Batch pop() {
        if (complete_.empty()) {
            complete();
        }
        Batch oldest;
        if (!complete_.empty()) {
            oldest = std::move(complete_.front());
            complete_.pop_front();
            ++first;
            records -= oldest.count;
            bytes -= oldest.records.size();
        }
        return oldest;
    }
    std::size_t complete_count() const { return complete_.size(); }

    u64 first = 0;       // how many batches are gone
    u64 records = 0;     // that wait
    std::size_t bytes = 0;
    u64 pushed_out = 0;  // numbers that gave way, since the reader took the count

private:
    static constexpr u64 kNumbersMax = 4096;
    static constexpr std::size_t kSpareBytesMax = std::size_t{4} << 20;

    void make_room() {
        while (bytes > bytes_max_ && !complete_.empty()) {
            pushed_out += pop().numbers;
        }
    }

    std::deque<Batch> complete_;
    Batch newest_;
    std::string spare_;
    const std::size_t batch_bytes_max_, bytes_max_;
};

}  // namespace kv
