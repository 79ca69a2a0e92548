#include "shared_region.hpp"

#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kv {

namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::size_t in_pages(std::size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

void expect(int found, const char* what) {
    if (found != 0) {
        throw std::system_error(found, std::generic_category(), what);
    }
}

#if defined(__linux__)

// Zeroed address space that begins at a huge page.
char* shared_pages(std::size_t bytes) {
    const int flags = MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE;
    void* made = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (made == MAP_FAILED) {
        throw std::bad_alloc();
    }
    char* begin = static_cast<char*>(made);
    const std::size_t skipped = (kHugePage - reinterpret_cast<std::uintptr_t>(made) % kHugePage) % kHugePage;
    if (skipped != 0) {
        munmap(begin, skipped);
    }
    munmap(begin + skipped + bytes, kHugePage - skipped);
    madvise(begin + skipped, bytes, MADV_HUGEPAGE);
    return begin + skipped;
}

void give_back(char* begin, std::size_t bytes) { munmap(begin, bytes); }

// The pages are zero again, and take no memory.
void wipe_pages(char* begin, std::size_t bytes) {
    expect(madvise(begin, bytes, MADV_REMOVE) == 0 ? 0 : errno, "memory of the shared index");
}

void allow_reading_only(char* begin, std::size_t bytes) {
    expect(mprotect(begin, bytes, PROT_READ) == 0 ? 0 : errno, "memory of the shared index");
}

// Also where its last owner died: what that one left is told by `is_changing`.
void lock(pthread_mutex_t& mutex) {
    const int found = pthread_mutex_lock(&mutex);
    expect(found == EOWNERDEAD ? pthread_mutex_consistent(&mutex) : found, "lock of a reader");
}

void make_lock(pthread_mutex_t& mutex) {
    pthread_mutexattr_t kind;
    expect(pthread_mutexattr_init(&kind), "lock of a reader");
    pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
    const int found = pthread_mutex_init(&mutex, &kind);
    pthread_mutexattr_destroy(&kind);
    expect(found, "lock of a reader");
}

#else  // without robust locks, which let go of a process that died

char* shared_pages(std::size_t) { throw std::system_error(ENOTSUP, std::generic_category(), "memory of the shared index"); }
void give_back(char*, std::size_t) {}
void wipe_pages(char*, std::size_t) {}
void allow_reading_only(char*, std::size_t) {}
void lock(pthread_mutex_t& mutex) { expect(pthread_mutex_lock(&mutex), "lock of a reader"); }
void make_lock(pthread_mutex_t&) {}

#endif

}  // namespace

std::size_t SharedRegion::header_bytes() { return in_pages(sizeof(Header)); }
std::size_t SharedRegion::place_bytes() { return in_pages(sizeof(Place)); }

// A lane has room for all that a tree may take, and as much again, as a buffer grows by half: address space costs nothing.
SharedRegion::SharedRegion(u32 readers, u64 memory_bytes_max)
    : readers_(readers),
      lane_bytes_(in_pages(2 * memory_bytes_max) + (std::size_t{64} << 20)),
      bytes_(header_bytes() + kPlaces * whole_place_bytes()) {
    begin_ = shared_pages(bytes_);
    header_ = new (begin_) Header{};
    header_->current = kNone;
    for (u32 reader = 0; reader < readers_; ++reader) {
        make_lock(header_->locks[reader].mutex);
    }
}

SharedRegion::~SharedRegion() { give_back(begin_, bytes_); }

SharedRegion::Change::Change(SharedRegion* region) : region_(region) {
    if (region_ == nullptr) {
        return;
    }
    for (u32 reader = 0; reader < region_->readers_; ++reader) {
        lock(region_->header_->locks[reader].mutex);
    }
    region_->header_->is_changing.store(1);
}

SharedRegion::Change::~Change() {
    if (region_ == nullptr) {
        return;
    }
    region_->header_->is_changing.store(0);
    for (u32 reader = 0; reader < region_->readers_; ++reader) {
        pthread_mutex_unlock(&region_->header_->locks[reader].mutex);
    }
}

SharedRegion::Reading::Reading(SharedRegion& region, u32 reader)
    : region_(region), lock_(&region.header_->locks[reader].mutex) {
    lock(*lock_);
    const Header& header = *region.header_;
    const bool is_whole = header.is_changing.load() == 0 && header.current != kNone;
    place_ = is_whole ? &region.place(header.current) : nullptr;
}

SharedRegion::Reading::~Reading() { pthread_mutex_unlock(lock_); }

void SharedRegion::EndTree::operator()(Tree* tree) const {
    if (region == nullptr) {
        delete tree;
    } else {
        region->end(tree);
    }
}

void SharedRegion::begin_writing() {
    const bool was_torn = header_->is_changing.load() != 0;
    const Change change(this);
    if (was_torn) {
        header_->current = kNone;
    }
    header_->is_written = false;
    ++header_->version;
    for (u32 number = 0; number < kPlaces; ++number) {
        if (number != header_->current) {
            wipe(number);
        }
    }
}

SharedRegion::OwnedTree SharedRegion::new_tree(SharedRegion* region, const Limits& limits) {
    if (region == nullptr) {
        return OwnedTree(new Tree(limits), EndTree{});
    }
    u32 number = 0;
    while (number < kPlaces && (region->is_own_[number] || number == region->header_->current)) {
        ++number;
    }
    if (number == kPlaces) {
        throw std::bad_alloc();
    }
    Tree* made = new (region->place(number).tree) Tree(limits, region->lanes_of(number));
    region->is_own_[number] = true;
    return OwnedTree(made, EndTree{region});
}

void SharedRegion::publish(const Tree& tree) {
    const u32 former = header_->current;
    {
        const Change change(this);
        header_->current = number_of(tree);
        header_->is_written = true;
        ++header_->version;
    }
    if (former != kNone && !is_own_[former]) {
        wipe(former);  // without destroying its tree, which refers to the memory of a process that is gone
    }
}

void SharedRegion::on_writer_ended() {
    header_->is_written = false;
    ++header_->version;
}

void SharedRegion::write_names(const Tree& tree, const char* names, std::size_t bytes) {
    Place& own = place_of(tree);
    std::memcpy(own.names, names, bytes);
    own.names_bytes = bytes;
    own.names_version = ++header_->version;
}

void SharedRegion::write_status(const Tree& tree, u32 slot, const SlotStatus& status) {
    place_of(tree).statuses[slot] = status;
    ++header_->version;
}

void SharedRegion::write_log_seq(const Tree& tree, u64 log_seq) { place_of(tree).log_seq = log_seq; }

void SharedRegion::write_progress(const std::string& text) {
    const std::size_t bytes = text.copy(header_->progress, kProgressMax);
    header_->progress[bytes] = 0;
}

void SharedRegion::protect() {
    allow_reading_only(begin_of(0), kPlaces * whole_place_bytes());
}

u32 SharedRegion::number_of(const Tree& tree) const {
    return static_cast<u32>(static_cast<std::size_t>(reinterpret_cast<const char*>(&tree) - begin_of(0)) / whole_place_bytes());
}

TreeLanes SharedRegion::lanes_of(u32 number) const {
    char* next = begin_of(number) + place_bytes();
    const auto lane = [&next, this] {
        next += lane_bytes_;
        return Lane{next - lane_bytes_, lane_bytes_};
    };
    return {lane(), lane(), lane(), lane(), lane(), lane(), lane()};
}

void SharedRegion::wipe(u32 number) { wipe_pages(begin_of(number), whole_place_bytes()); }

void SharedRegion::end(Tree* tree) {
    const u32 number = number_of(*tree);
    is_own_[number] = false;
    if (is_published(*tree)) {
        on_writer_ended();  // readers read it on, so that it is left as by a writer that was killed
        return;
    }
    tree->~Tree();
    wipe(number);
}

}  // namespace kv
