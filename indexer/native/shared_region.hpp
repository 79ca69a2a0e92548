// Memory in which one process keeps a tree that others match against. It is made before they are forked, so that it has the
// same address in all of them.
//
//     header    which place is read, and whether a change is under way
//     locks     one for each reader. A reader holds its own while it reads, the writer all of them while it changes
//               something: readers never wait for each other
//     places    three, each with room for a tree and for what is told of its ranks: one is read; a new writer builds in
//               another, and needs the third where it restores a snapshot
//
// Any process may be killed at any time. A reader that dies has changed nothing, and its lock is free again. A writer that
// dies between two changes leaves a whole tree: it is read until the next writer's is ready. One that dies in the midst of
// a change leaves `is_changing` set, and then nothing is known until the next writer's tree is ready.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include <pthread.h>

#include "common.hpp"
#include "tree.hpp"

namespace kv {

// What is told of the stream of a rank; `doubt` is a number that the two sides agree on.
struct SlotStatus {
    u64 epoch, seq;
    u32 doubt;
};

class SharedRegion {
public:
    static constexpr u32 kReadersMax = 64, kPlaces = 3;
    static constexpr std::size_t kNamesMax = std::size_t{2} << 20, kProgressMax = 255;

    // What one tree's readers read.
    struct Place {
        u64 names_version, names_bytes, log_seq;
        SlotStatus statuses[kRankMax + 1];
        char names[kNamesMax];
        alignas(64) unsigned char tree[sizeof(Tree)];
        const Tree& its_tree() const { return *reinterpret_cast<const Tree*>(tree); }
    };

    // Throws std::bad_alloc where there is not so much address space.
    SharedRegion(u32 readers, u64 memory_bytes_max);
    SharedRegion(const SharedRegion&) = delete;
    SharedRegion& operator=(const SharedRegion&) = delete;
    ~SharedRegion();

    u32 readers() const { return readers_; }

    // A change, which no reader sees half of. Without a region there are no readers.
    class Change {
    public:
        explicit Change(SharedRegion* region);
        Change(const Change&) = delete;
        ~Change();

    private:
        SharedRegion* region_;
    };

    // What a reader reads cannot change while this lives; `place` is null while nothing is known.
    class Reading {
    public:
        Reading(SharedRegion& region, u32 reader);
        Reading(const Reading&) = delete;
        ~Reading();

        const Place* place() const { return place_; }
        u64 version() const { return region_.header_->version; }
        bool is_written() const { return region_.header_->is_written; }
        std::string progress() const { return region_.header_->progress; }

    private:
        SharedRegion& region_;
        pthread_mutex_t* lock_;
        const Place* place_;
    };

    struct EndTree {
        SharedRegion* region = nullptr;  // none: the tree is on the heap
        void operator()(Tree* tree) const;
    };
    using OwnedTree = std::unique_ptr<Tree, EndTree>;

    // This process is the writer: what a former one left is no longer written. Nothing else may be one.
    void begin_writing();
    // A new tree in a free place, on the heap where `region` is null.
    static OwnedTree new_tree(SharedRegion* region, const Limits& limits);
    // This tree is read from now on.
    void publish(const Tree& tree);
    bool is_published(const Tree& tree) const { return header_->current == number_of(tree); }
    // Nothing is written until a writer publishes. Any process may say so.
    void on_writer_ended();

    // Told of a tree and its ranks, within a Change.
    void write_names(const Tree& tree, const char* names, std::size_t bytes);
    void write_status(const Tree& tree, u32 slot, const SlotStatus& status);
    void write_log_seq(const Tree& tree, u64 log_seq);
    void write_progress(const std::string& text);

    // This process cannot write to the places any more.
    void protect();

private:
    struct alignas(64) Lock {
        pthread_mutex_t mutex;
    };
    struct Header {
        std::atomic<u32> is_changing;
        u32 current;  // a place, or kNone
        u64 version;  // of all that is told of ranks, whatever the place
        bool is_written;
        char progress[kProgressMax + 1];
        Lock locks[kReadersMax];
    };

    static std::size_t header_bytes();
    static std::size_t place_bytes();
    std::size_t whole_place_bytes() const { return place_bytes() + TreeLanes::kLanes * lane_bytes_; }
    char* begin_of(u32 place) const { return begin_ + header_bytes() + place * whole_place_bytes(); }
    Place& place(u32 number) const { return *reinterpret_cast<Place*>(begin_of(number)); }
    u32 number_of(const Tree& tree) const;
    Place& place_of(const Tree& tree) const { return place(number_of(tree)); }
    TreeLanes lanes_of(u32 place) const;
    void wipe(u32 place);
    void end(Tree* tree);

    u32 readers_;
    std::size_t lane_bytes_, bytes_;
    char* begin_ = nullptr;
    Header* header_ = nullptr;
    bool is_own_[kPlaces] = {};  // a tree of this process is there
};

}  // namespace kv
