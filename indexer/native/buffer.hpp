// A growing array of plain values in zeroed, aligned memory. Large ones live in pages of their own, which grow without
// being copied and cost nothing until they are touched; huge pages are asked for, since every access is a random one.
#pragma once

#include <cassert>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "common.hpp"

namespace kv {

#if defined(__has_feature)  // clang's way to ask; GCC defines a macro
#define KV_HAS_FEATURE(name) __has_feature(name)
#else
#define KV_HAS_FEATURE(name) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || KV_HAS_FEATURE(address_sanitizer)
constexpr bool kIsChecked = true;
#else
constexpr bool kIsChecked = false;
#endif

template <class T>
class Buffer {
    static_assert(std::is_trivially_copyable<T>::value, "values are moved as bytes");

public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { release(); }

    T& operator[](std::size_t at) {
        assert(!kIsChecked || at < bytes_ / sizeof(T));
        return data_[at];
    }
    const T& operator[](std::size_t at) const { return const_cast<Buffer&>(*this)[at]; }
    T* data() { return data_; }
    const T* data() const { return data_; }

    // Makes room for `count` values; new ones are zero. Throws std::bad_alloc, and then nothing has changed.
    void reserve(std::size_t count) {
        if (count * sizeof(T) <= bytes_) {
            return;
        }
        std::size_t bytes = count * sizeof(T);
        if (!kIsChecked) {
            bytes = bytes < bytes_ + bytes_ / 2 ? bytes_ + bytes_ / 2 : bytes;
            const std::size_t unit = bytes < kPaged ? kLine : kHugePage;
            bytes = (bytes + unit - 1) / unit * unit;
        }
        data_ = static_cast<T*>(grow(data_, bytes_, bytes));
        bytes_ = bytes;
    }

    void release() {
        if (data_ != nullptr) {
            give_back(data_, bytes_);
        }
        data_ = nullptr;
        bytes_ = 0;
    }

private:
    static constexpr std::size_t kLine = 64, kHugePage = std::size_t{2} << 20;
    // AddressSanitizer builds take all memory from `operator new`, so that it checks every byte.
    static constexpr std::size_t kPaged = kIsChecked ? ~std::size_t{0} : std::size_t{1} << 20;

    static void* take(std::size_t bytes) {
        return std::memset(::operator new(bytes, std::align_val_t{kLine}), 0, bytes);
    }

#if defined(__linux__)
    // Reserves `bytes` of address space that begin at a huge page.
    static void* reserve_pages(std::size_t bytes) {
        void* made = mmap(nullptr, bytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (made == MAP_FAILED) {
            throw std::bad_alloc();
        }
        char* begin = static_cast<char*>(made);
        const std::size_t skipped = (kHugePage - reinterpret_cast<std::uintptr_t>(made) % kHugePage) % kHugePage;
        if (skipped != 0) {
            munmap(begin, skipped);
        }
        munmap(begin + skipped + bytes, kHugePage - skipped);
        return begin + skipped;
    }

    static void* grow(void* old, std::size_t old_bytes, std::size_t bytes) {
        if (bytes < kPaged) {
            return move(old, old_bytes, take(bytes));
        }
        void* made = reserve_pages(bytes);
        void* mapped = old_bytes >= kPaged
            ? mremap(old, old_bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, made)
            : mmap(made, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        if (mapped == MAP_FAILED) {
            munmap(made, bytes);
            throw std::bad_alloc();
        }
        madvise(mapped, bytes, MADV_HUGEPAGE);
        return old_bytes >= kPaged ? mapped : move(old, old_bytes, mapped);
    }

    static void give_back(void* data, std::size_t bytes) {
        if (bytes >= kPaged) {
            munmap(data, bytes);
        } else {
            ::operator delete(data, std::align_val_t{kLine});
        }
    }
#else
    static void* grow(void* old, std::size_t old_bytes, std::size_t bytes) {
        return move(old, old_bytes, take(bytes));
    }
    static void give_back(void* data, std::size_t) { ::operator delete(data, std::align_val_t{kLine}); }
#endif

    static void* move(void* old, std::size_t old_bytes, void* made) {
        if (old != nullptr) {
            std::memcpy(made, old, old_bytes);
            ::operator delete(old, std::align_val_t{kLine});
        }
        return made;
    }

    T* data_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace kv
