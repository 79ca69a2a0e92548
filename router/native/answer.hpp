// What a complete answer says of itself, and its TTFT and ITL: when each is known, and when not. Knows nothing of Python.
//
// | answer | first token | mean time between tokens |
// |---|---|---|
// | event stream | its first bytes | from there to its end, per later token; not known if all came at once |
// | a prefill worker's answer | its end, as it has only one token | none |
// | another complete one whose worker states the decode time | its end, less that time | that time, per later token |
// | any other | not known: its first byte came with its last token | not known |
//
// Tokens are counted by `usage`; in a stream without it by token comments; in one with neither by events. If an engine puts several tokens
// into one event, the time between events is an upper bound. Where an answer has several choices it is not known which token
// followed which. A value that is not known is none, and is not counted.
#pragma once

#include <optional>
#include <utility>

#include "ordered_map.hpp"

namespace kv {

struct Answer {
    std::optional<i64> output_tokens, cached_tokens, input_tokens;  // as its worker counts them; none: not stated
    std::optional<i64> later_tokens;                                // after the first; none: all of `output_tokens` but the first
    std::optional<double> decode_s;                                 // from first token to end, by its worker's clock
    bool came_whole = false;                                        // its first byte came with its last
};

// Returns the seconds from the decision to the first token, and the mean time between tokens. `first_s` and `duration_s`: from the
// decision to the first byte, and to the end. `later_tokens` came after the first; 0: none, or their number is unknown. `decode_s`: of
// an unstreamed answer, from its first token to its end, by its worker's clock; none: not stated.
inline std::pair<std::optional<double>, std::optional<double>> latency_of(std::optional<double> first_s, double duration_s, i64 later_tokens,
                                                                          std::optional<double> decode_s, bool is_streamed) {
    if (is_streamed) {
        decode_s = first_s.has_value() ? std::optional<double>(duration_s - *first_s) : std::nullopt;
    } else if (!decode_s.has_value() || *decode_s > duration_s) {  // not stated, or implausible
        return {};
    } else {
        first_s = duration_s - *decode_s;
    }
    const bool is_spread = decode_s.has_value() && *decode_s != 0 && later_tokens > 0;
    return {first_s, is_spread ? std::optional<double>(*decode_s / static_cast<double>(later_tokens)) : std::nullopt};
}

}  // namespace kv
