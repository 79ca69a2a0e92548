# Fuzzers of what reads foreign bytes, by clang's libFuzzer: part of the Makefile. They are built without Python: of what
# includes neither nanobind nor a header of ours that does.
FUZZ_SECONDS ?= 600
FUZZ_OUT     := build/fuzz
FUZZ_CXX     := clang++
FUZZ_FLAGS   := -std=c++17 -g -O2 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all -Wall -Wextra
FUZZ_COVERAGE := -fsanitize=fuzzer-no-link
FUZZ_BINDING := nanobind $(notdir $(shell grep -l nanobind indexer/native/*.hpp))
FUZZ_CORE    := $(patsubst indexer/native/%.cpp,$(FUZZ_OUT)/%.o,$(shell grep -L $(FUZZ_BINDING:%=-e %) indexer/native/*.cpp))
FUZZ_HEADERS := $(wildcard indexer/native/*.hpp) tests/fuzz/harness.hpp tests/fuzz/state.hpp \
  tests/fuzz/fuzz.mk
FUZZERS      := $(FUZZ_OUT)/apply_batch $(FUZZ_OUT)/restore
FUZZ_PLANTED := $(foreach bug,1 2,$(FUZZERS:%=%_planted_$(bug)))
FUZZ_CHECK   := echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' \
  | $(FUZZ_CXX) -fsanitize=fuzzer,address -x c++ - -o /dev/null 2>/dev/null

.PHONY: fuzz fuzz-smoke fuzz-clang
.SECONDARY: $(FUZZ_CORE)

fuzz: fuzz-clang $(READY)  ## search for inputs that break the native tree, for FUZZ_SECONDS (600)
	@$(MAKE) --no-print-directory -j2 $(FUZZERS)
	@tests/fuzz/run $(FUZZ_SECONDS)

fuzz-smoke: $(READY)  # the same for 20 s, after a proof that planted bugs are found; where there is no clang, none of it
	@if $(MAKE) --no-print-directory fuzz-clang; then \
	  $(MAKE) --no-print-directory -j2 $(FUZZERS) $(FUZZ_PLANTED) && tests/fuzz/run 20 planted; \
	else echo "no clang with libFuzzer, and none could be installed: NOTHING WAS FUZZED"; fi

fuzz-clang:
	@$(FUZZ_CHECK) || { $(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq clang \
	  && { $(FUZZ_CHECK) || $(SUDO) apt-get install -y -qq libclang-rt-$$($(FUZZ_CXX) -dumpversion | cut -d. -f1)-dev; } \
	  && $(FUZZ_CHECK); }

# No input is better for what the self-check looks at, or for hashes that are nearly equal.
$(FUZZ_OUT)/check.o: FUZZ_COVERAGE :=
$(FUZZ_OUT)/block_map.o: FUZZ_COVERAGE += -fno-sanitize-coverage=trace-cmp

$(FUZZ_OUT)/%.o: indexer/native/%.cpp $(FUZZ_HEADERS)
	@mkdir -p $(@D)
	$(FUZZ_CXX) $(FUZZ_FLAGS) $(FUZZ_COVERAGE) -c $< -o $@

$(FUZZ_OUT)/%: tests/fuzz/fuzz_%.cpp $(FUZZ_CORE) $(FUZZ_HEADERS)
	$(FUZZ_CXX) $(FUZZ_FLAGS) -fsanitize=fuzzer $< $(FUZZ_CORE) -o $@

$(FUZZ_OUT)/%_planted_1: tests/fuzz/fuzz_%.cpp $(FUZZ_CORE) $(FUZZ_HEADERS)
	$(FUZZ_CXX) $(FUZZ_FLAGS) -fsanitize=fuzzer -DKV_PLANTED_BUG=1 $< $(FUZZ_CORE) -o $@

$(FUZZ_OUT)/%_planted_2: tests/fuzz/fuzz_%.cpp $(FUZZ_CORE) $(FUZZ_HEADERS)
	$(FUZZ_CXX) $(FUZZ_FLAGS) -fsanitize=fuzzer -DKV_PLANTED_BUG=2 $< $(FUZZ_CORE) -o $@
