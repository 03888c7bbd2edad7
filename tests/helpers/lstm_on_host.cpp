// rnnt/kernels/lstm.cu on a CPU: an OS thread for a block, a fiber for each of its threads, which gives way wherever
// CUDA's threads wait for each other. Fragments of m16n8k16 lie as the PTX manual has them.
#include <setjmp.h>
#include <ucontext.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define HOST_CHECK
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__ static thread_local
#define reinterpret_word(to) reinterpret_cast<std::atomic<unsigned>*>(to)

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) float2 { float x, y; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static float2 make_float2(float x, float y) { return {x, y}; }

typedef unsigned short Half;
struct Index { int x; };
static thread_local Index threadIdx, blockIdx;

constexpr int FIBERS = 256;

struct Meeting {
    int arrived = 0;
    unsigned generation = 0;
};

struct Slot {
    unsigned a[4], b[2], word;
};

// A fiber begins by setcontext and changes by _setjmp and _longjmp, which make no system call: swapcontext makes two.
struct Block {
    ucontext_t starts[FIBERS];
    jmp_buf scheduler, fibers[FIBERS];
    bool begun[FIBERS] = {}, done[FIBERS] = {};
    Meeting whole, warps[FIBERS / 32];
    Slot slots[FIBERS];
};

static thread_local Block* block;

static void give_way() {
    const int own = threadIdx.x;
    if (_setjmp(block->fibers[own]) == 0) _longjmp(block->scheduler, 1);
    threadIdx.x = own;
}

static void resume(int index) {
    threadIdx.x = index;
    if (_setjmp(block->scheduler) != 0) return;
    if (block->begun[index]) _longjmp(block->fibers[index], 1);
    block->begun[index] = true;
    setcontext(&block->starts[index]);
}

static void meet(Meeting& meeting, int size) {
    const unsigned generation = meeting.generation;
    if (++meeting.arrived == size) {
        meeting.arrived = 0;
        ++meeting.generation;
    } else {
        while (meeting.generation == generation) give_way();
    }
}

// What the blocks of a launch know of each other, by block or cluster. TLS is laid out alike in all of their threads.
struct Shared {
    std::atomic<char*> bases[256] = {};
    std::atomic<int> arrived[256] = {};
    std::atomic<unsigned> generations[256] = {};
};

static Shared* shared;

template <typename T>
static T* in_block(T* here, int rank) {
    char* base = shared->bases[blockIdx.x / CLUSTER * CLUSTER + rank];
    return reinterpret_cast<T*>(base + (reinterpret_cast<char*>(here) - reinterpret_cast<char*>(&threadIdx)));
}

// What lies in the kernel's word. Bytes may arrive before they are expected, as on a GPU.
struct Count {
    int missing;
    short is_expected, phase;

    void change(int by) {
        missing += by;
        if (is_expected && missing == 0) is_expected = 0, ++phase;
    }
};

static std::mutex counting;

static void make_barrier(unsigned long long* barrier) { *reinterpret_cast<Count*>(barrier) = {}; }

static void expect(unsigned long long* barrier, unsigned num_bytes) {
    std::lock_guard<std::mutex> guard(counting);
    Count& count = *reinterpret_cast<Count*>(barrier);
    count.is_expected = 1;
    count.change(num_bytes);
}

static void send(float2 value, float2* to, unsigned long long* barrier, int rank) {
    std::lock_guard<std::mutex> guard(counting);
    *in_block(to, rank) = value;
    reinterpret_cast<Count*>(in_block(barrier, rank))->change(-int(sizeof value));
}

static bool has_arrived(unsigned long long* barrier, unsigned parity) {
    {
        std::lock_guard<std::mutex> guard(counting);
        if (unsigned(reinterpret_cast<Count*>(barrier)->phase % 2) != parity) return true;
    }
    give_way();
    return false;
}

static void meet_cluster() {
    const int cluster = blockIdx.x / CLUSTER;
    const unsigned generation = shared->generations[cluster];
    if (++shared->arrived[cluster] == FIBERS * CLUSTER) {
        shared->arrived[cluster] = 0;
        ++shared->generations[cluster];
    } else {
        while (shared->generations[cluster] == generation) give_way();
    }
}

static void meet_warp() { meet(block->warps[threadIdx.x / 32], 32); }
static Slot* warp_slots() { return block->slots + threadIdx.x / 32 * 32; }
static void __syncthreads() { meet(block->whole, FIBERS); }

static unsigned exchange(unsigned word, int mask) {
    block->slots[threadIdx.x].word = word;
    meet_warp();
    const unsigned other = warp_slots()[threadIdx.x % 32 ^ mask].word;
    meet_warp();
    return other;
}

static unsigned __shfl_xor_sync(unsigned, unsigned word, int mask) { return exchange(word, mask); }

static float __shfl_xor_sync(unsigned, float value, int mask) {
    unsigned word;
    memcpy(&word, &value, 4);
    word = exchange(word, mask);
    memcpy(&value, &word, 4);
    return value;
}

static bool __any_sync(unsigned, bool predicate) {
    block->slots[threadIdx.x].word = predicate;
    meet_warp();
    bool any = false;
    for (int lane = 0; lane < 32; ++lane) any |= warp_slots()[lane].word != 0;
    meet_warp();
    return any;
}

static float to_float(uint16_t bits) {
    _Float16 half;
    memcpy(&half, &bits, 2);
    return float(half);
}

static unsigned to_halves(float low, float high) {
    const _Float16 halves[2] = {_Float16(low), _Float16(high)};
    unsigned word;
    memcpy(&word, halves, 4);
    return word;
}

static float element(unsigned word, int index) { return to_float(uint16_t(word >> 16 * index)); }

static void multiply_add(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const int lane = threadIdx.x % 32;
    block->slots[threadIdx.x] = {{a[0], a[1], a[2], a[3]}, {b0, b1}, 0};
    meet_warp();
    for (int i = 0; i < 4; ++i) {
        const int group = lane / 4, column = lane % 4 * 2 + i % 2, lower = i / 2;
        for (int k = 0; k < 16; ++k) {
            const Slot &of_a = warp_slots()[group * 4 + k % 8 / 2], &of_b = warp_slots()[column * 4 + k % 8 / 2];
            sums[i] += element(of_a.a[lower + k / 8 * 2], k % 2) * element(of_b.b[k / 8], k % 2);
        }
    }
    meet_warp();
}

static uint4 load_once(const uint4* from) { return *from; }
static Half load_once(const Half* from) { return *from; }

static uint4 load_exchanged(const uint4* from) {
    unsigned words[4];
    for (int i = 0; i < 4; ++i)
        words[i] = reinterpret_word((unsigned*)from + i)->load(std::memory_order_relaxed);
    return {words[0], words[1], words[2], words[3]};
}

static void store_exchanged(void* to, unsigned word) {
    reinterpret_word(to)->store(word == 0xffffffffu ? 0x7fff7fffu : word, std::memory_order_relaxed);
}

static float reciprocal(float x) { return 1.0f / x; }
static float power_of_2(float x) { return std::exp2(x); }
static void settle(float&) {}

#include "lstm.cu"

static thread_local const Work* work;
static thread_local bool is_forward;

static void fiber() {
    is_forward ? lstm_forward(*work) : lstm_backward(*work);
    block->done[threadIdx.x] = true;
    give_way();
}

static void run_block(const Work& what, bool forward, int index) {
    constexpr size_t STACK = 64 * 1024;
    std::unique_ptr<Block> own(new Block);
    std::unique_ptr<char[]> stacks(new char[FIBERS * STACK]);
    block = own.get(), work = &what, is_forward = forward, blockIdx.x = index;
    shared->bases[index] = reinterpret_cast<char*>(&threadIdx);
    for (int i = 0; i < FIBERS; ++i) {
        getcontext(&own->starts[i]);
        own->starts[i].uc_stack.ss_sp = stacks.get() + i * STACK;
        own->starts[i].uc_stack.ss_size = STACK;
        makecontext(&own->starts[i], fiber, 0);
    }
    for (int left = FIBERS; left > 0;) {
        left = 0;
        for (int i = 0; i < FIBERS; ++i) {
            if (own->done[i]) continue;
            ++left;
            resume(i);
        }
        std::this_thread::yield();
    }
}

extern "C" int size_of_work() { return sizeof(Work); }

// absent: a block that is not run, as if it never became resident; -1: none.
extern "C" void run(const Work* what, bool forward, int num_blocks, int absent) {
    std::unique_ptr<Shared> own(new Shared);
    shared = own.get();
    std::vector<std::thread> threads;
    for (int i = 0; i < num_blocks; ++i)
        if (i != absent) threads.emplace_back(run_block, std::cref(*what), forward, i);
    for (auto& thread : threads) thread.join();
}
