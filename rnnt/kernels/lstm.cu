// The recurrence of LSTM layers, forwards and backwards; rnnt/lstm.py has the rest.
//
// A launch runs a stretch of time steps of one layer, or of two side by side: then the second half of the grid has a
// layer, too. The layer's cell, or its gradient, passes from a stretch to the next in FP32, so the end of a stretch
// changes no bit of h and of the gates' gradients.
//
// A block owns UNITS hidden units and keeps their recurrent weights in registers, as operands of m16n8k16: weights are
// the 16 rows, the batch of 8 the columns. A warp has an eighth of the inner dimension. Its partial sums are added
// through shared memory in a fixed order, so the same numbers give the same bits run after run.
//
// Between time steps blocks exchange results through the output tensor, which is filled with EMPTY before its first
// launch: a word of it is either EMPTY or final, and its readers read until it is there. That costs one journey through
// L2, where a flag beside the data costs three; and words need no order, hence no fences. All blocks must be resident,
// so the launch is cooperative. A warp that has read PATIENCE times in vain sets *status and stops waiting; then its
// results are NaN. Backwards four times as much is exchanged, so CLUSTER blocks share it: each multiplies a part of it
// by the weights of the units of all of them, and they send each other the sums.
//
// A batch may be padded. Blocks read its utterances' lengths and stop with the longest: results after it are 0 and cost
// no time step. Dropout of a layer's output is applied here, by a mask drawn before.
//
// From the command line: HIDDEN (a multiple of 256), CLUSTER (1, 2 or 4), PATIENCE. No headers. The tests run all but
// "Instructions" on the CPU.

typedef unsigned short Half;  // its bits
typedef unsigned long long Barrier;

constexpr int BATCH = 8;
constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int UNITS = 16;
constexpr int PAIRS = BATCH / 2;
constexpr unsigned ALL = 0xffffffffu;
// Two halves that are NaN with a payload no conversion gives.
constexpr unsigned EMPTY = 0xffffffffu;
constexpr unsigned NANS = 0x7fff7fffu;

// ------------------------------------------------------------------------------------------------
// Instructions

#ifndef HOST_CHECK

__device__ inline uint4 load_exchanged(const uint4* from) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}

__device__ inline void store_exchanged(void* to, unsigned word) {
    word = word == EMPTY ? NANS : word;
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

// Volatile: once, not again in each time step to save registers.
__device__ inline uint4 load_once(const uint4* from) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

__device__ inline Half load_once(const Half* from) {
    Half v;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(from));
    return v;
}

// sums += A B of 16x16 and 16x8. Lane l has rows l / 4 and + 8 of A and sums, column l / 4 of B.
__device__ inline void multiply_add(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline float to_float(Half bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ inline unsigned to_halves(float low, float high) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// Blocks of a cluster store in each other's memory and count the bytes at a barrier there; the cluster's own barrier
// would wait for all that is on its way to L2, too.
__device__ inline unsigned address_of(void* shared) {
    unsigned address;
    asm("{ .reg .u64 to; cvta.to.shared.u64 to, %1; cvt.u32.u64 %0, to; }" : "=r"(address) : "l"(shared));
    return address;
}

__device__ inline unsigned address_in_block(void* shared, int rank) {
    unsigned address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(address_of(shared)), "r"(rank));
    return address;
}

__device__ inline void make_barrier(Barrier* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address_of(barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// For one thread, once for each time.
__device__ inline void expect(Barrier* barrier, unsigned num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address_of(barrier)), "r"(num_bytes)
                 : "memory");
}

__device__ inline void send(float2 value, float2* to, Barrier* barrier, int rank) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                     address_in_block(to, rank)), "f"(value.x), "f"(value.y), "r"(address_in_block(barrier, rank))
                 : "memory");
}

// parity: of the number of times that came before.
__device__ inline bool has_arrived(Barrier* barrier, unsigned parity) {
    unsigned arrived;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(arrived) : "r"(address_of(barrier)), "r"(parity) : "memory");
    return arrived;
}

__device__ inline void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ inline float reciprocal(float x) { return __fdividef(1.0f, x); }

__device__ inline float power_of_2(float x) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

// Computed here, not where it is needed.
__device__ inline void settle(float& x) { asm volatile("" : "+f"(x)); }

#endif

// ------------------------------------------------------------------------------------------------
// The kernels

constexpr float LOG2_E = 1.44269504f;

__device__ inline float sigmoid(float x) { return reciprocal(1.0f + power_of_2(-LOG2_E * x)); }

__device__ inline float hyperbolic_tangent(float x) {
    return 1.0f - 2.0f * reciprocal(1.0f + power_of_2(2.0f * LOG2_E * x));
}

__device__ inline unsigned larger(unsigned a, unsigned b) { return a > b ? a : b; }
__device__ inline bool has_empty(uint4 v) { return larger(larger(v.x, v.y), larger(v.z, v.w)) == EMPTY; }

// The operands of m16n8k16 may be permuted along the inner dimension if both are alike. Here a lane's four words of one
// 16-byte load, of eight neighbours along it, are two operands: 32 elements in 4 lanes for two products.
//
// vector(r, v): the lane's eight weights of row r of 16 * TILES, for what it gets in its load v.
template <int TILES, int VECTORS, typename Vector>
__device__ void load_weights(unsigned (&a)[VECTORS][2][TILES][4], Vector vector) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const int first = tile * 16 + threadIdx.x % 32 / 4;
            const uint4 top = vector(first, v), bottom = vector(first + 8, v);
            a[v][0][tile][0] = top.x, a[v][0][tile][1] = bottom.x, a[v][0][tile][2] = top.y;
            a[v][0][tile][3] = bottom.y, a[v][1][tile][0] = top.z, a[v][1][tile][1] = bottom.z;
            a[v][1][tile][2] = top.w, a[v][1][tile][3] = bottom.w;
        }
    }
}

// partial [16 * TILES][BATCH] becomes this warp's part of weights times exchanged, as soon as that is there.
// from: the lane's first vector of what is exchanged. patience: alike in all lanes.
template <int TILES, int VECTORS>
__device__ void multiply(const unsigned (&a)[VECTORS][2][TILES][4], const uint4* from, float (*partial)[BATCH],
                         unsigned& patience, int* status) {
    // Products that wait for the one before take 30 clocks and more: at least four chains.
    constexpr int CHAINS = TILES < 4 ? 4 / TILES : 1;
    constexpr int GROUP = (VECTORS + 3) / 4;
    float sums[CHAINS][TILES][4] = {};
    uint4 b[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) b[v] = load_exchanged(from + v * 4);
#pragma unroll
    for (int group = 0; group < VECTORS; group += GROUP) {
        while (true) {
            bool missing = false;
#pragma unroll
            for (int v = group; v < group + GROUP && v < VECTORS; ++v) missing |= has_empty(b[v]);
            if (!__any_sync(ALL, missing)) break;
            if (patience == 0) {
                *status = 1;
                break;
            }
            --patience;
            // What comes after it was read at the same time and is as likely not there.
#pragma unroll
            for (int v = group; v < VECTORS; ++v) b[v] = load_exchanged(from + v * 4);
        }
#pragma unroll
        for (int v = group; v < group + GROUP && v < VECTORS; ++v) {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
                multiply_add(sums[2 * v % CHAINS][tile], a[v][0][tile], b[v].x, b[v].y);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
                multiply_add(sums[(2 * v + 1) % CHAINS][tile], a[v][1][tile], b[v].z, b[v].w);
        }
    }
    const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int chain = 1; chain < CHAINS; ++chain) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[0][tile][i] += sums[chain][tile][i];
        }
        float(&s)[4] = sums[0][tile];
        *reinterpret_cast<float2*>(&partial[tile * 16 + row][column]) = make_float2(s[0], s[1]);
        *reinterpret_cast<float2*>(&partial[tile * 16 + row + 8][column]) = make_float2(s[2], s[3]);
    }
}

// Time steps first to end of a layer of T. gates' order is torch's: i, f, g, o.
struct Layer {
    const Half* given;          // forwards W_ih x + b_ih [T, 8, 4 H], backwards the gradient [T, 8, H] of output
    const Half* weights;        // [4 H, H]
    const Half* bias;           // [4 H]
    Half *h, *cells;            // [T, 8, H]; after the last time step that is needed h is 0, cells are not written
    Half* gates;                // [T, 8, H, 4], after their activations; not written there either
    Half* output;               // [T, 8, H]: h after dropout; null where kept is
    const unsigned char* kept;  // [T, 8, H]: 1 where output is h times scale, 0 where it is 0; null without dropout
    Half* grad_gates;           // [T, 8, 4 H], before their activations, 0 where nothing is needed
    Half* grad_bias;            // [4 H], their sum, written by the stretch that has step 0
    float* state;               // [8, H]: forwards the cell, backwards its gradient, between stretches
    float* sums;                // [4 H]: of grad_bias, between stretches
    int first, end;
};

struct Work {  // as rnnt/kernels/lstm.py packs it
    Layer layers[2];
    const int* lengths;  // [8], or null
    int* status;
    float scale;
    int extra, num_steps;
};

// The time steps that the longest utterance has, all of them without lengths.
__device__ inline int steps_needed(const Work& work) {
    if (!work.lengths) return work.num_steps;
    int longest = 0;
#pragma unroll
    for (int b = 0; b < BATCH; ++b) longest = work.lengths[b] > longest ? work.lengths[b] : longest;
    return longest + work.extra < work.num_steps ? longest + work.extra : work.num_steps;
}

// Where the steps from first to end that are needed end.
__device__ inline int clamp(int needed, int first, int end) {
    return needed < first ? first : needed > end ? end : needed;
}

// Grid: HIDDEN / UNITS for each layer. State before step 0 is 0.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
lstm_forward(const __grid_constant__ Work work) {
    constexpr int BLOCKS = HIDDEN / UNITS;
    constexpr int VECTORS = HIDDEN / WARPS / 32, TILES = UNITS / 4, ROWS = 4 * UNITS;
    __shared__ float partial[2][WARPS][ROWS][BATCH];
    const Layer& layer = work.layers[blockIdx.x / BLOCKS];
    const Half *inputs = layer.given, *weights = layer.weights;
    Half *h = layer.h, *gates = layer.gates, *output = layer.output;
    const unsigned char* kept = layer.kept;
    int* status = work.status;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_unit = blockIdx.x % BLOCKS * UNITS;
    const int inner = warp * (HIDDEN / WARPS) + lane % 4 * 8;
    const int first = layer.first, end = layer.end;
    const int stop = clamp(steps_needed(work), first, end);
    unsigned patience = PATIENCE;

    unsigned a[VECTORS][2][TILES][4];
    load_weights<TILES, VECTORS>(a, [=](int row, int v) {
        const int at = row / UNITS * HIDDEN + first_unit + row % UNITS;
        return load_once(reinterpret_cast<const uint4*>(weights + size_t(at) * HIDDEN + inner + v * 32));
    });

    // A thread of the first warps has one unit of one utterance; its neighbour in units is 8 lanes away.
    const int b = threadIdx.x % BATCH, unit = threadIdx.x / BATCH, own = first_unit + unit;
    const bool has_unit = unit < UNITS;
    const bool is_even = unit % 2 == 0;
    // The even one writes h of both, the odd one the cells, without a branch in front of what others wait for.
    Half* to = (is_even ? h + own : layer.cells + own - 1) + (size_t(first) * BATCH + b) * HIDDEN;
    float* state = layer.state + b * HIDDEN + own;
    float biases[4] = {}, cell = 0, scale = 0, next_scale = 0;
    Half x[4] = {};
    // What comes from elsewhere is loaded in the step before.
    const auto load = [&](int t) {
        const size_t row = size_t(t) * BATCH + b;
#pragma unroll
        for (int q = 0; q < 4; ++q) x[q] = inputs[row * 4 * HIDDEN + q * HIDDEN + own];
        if (kept) next_scale = kept[row * HIDDEN + own] ? work.scale : 0.0f;
    };
    if (has_unit) {
#pragma unroll
        for (int q = 0; q < 4; ++q) biases[q] = to_float(layer.bias[q * HIDDEN + own]);
        if (first > 0) cell = *state;
        if (first < stop) load(first);
    }
    for (int t = first; t < stop; ++t) {
        float z[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) z[q] = to_float(x[q]) + biases[q];
        scale = next_scale;
        if (has_unit && t + 1 < stop) load(t + 1);
        if (t > 0) {
            const Half* from = h + (size_t(t - 1) * BATCH + lane / 4) * HIDDEN + inner;
            multiply<TILES, VECTORS>(a, reinterpret_cast<const uint4*>(from), partial[t % 2][warp], patience, status);
            // One barrier a step: the other half of partial is written before the next one.
            __syncthreads();
            if (has_unit) {
#pragma unroll
                for (int w = 0; w < WARPS; ++w) {
#pragma unroll
                    for (int q = 0; q < 4; ++q) z[q] += partial[t % 2][w][q * UNITS + unit][b];
                }
            }
        }
        if (has_unit) {
            const float i = sigmoid(z[0]), f = sigmoid(z[1]), g = hyperbolic_tangent(z[2]), o = sigmoid(z[3]);
            cell = f * cell + i * g;
            const float result = o * hyperbolic_tangent(cell);
            const float other = __shfl_xor_sync(ALL, is_even ? cell : result, BATCH);
            store_exchanged(to, to_halves(is_even ? result : other, is_even ? other : cell));
            to += BATCH * HIDDEN;
            const size_t at = (size_t(t) * BATCH + b) * HIDDEN + own;
            *reinterpret_cast<uint2*>(gates + at * 4) = make_uint2(to_halves(i, f), to_halves(g, o));
            if (output) output[at] = Half(to_halves(to_float(Half(to_halves(result, 0.0f))) * scale, 0.0f));
        }
    }
    for (int t = stop; t < end; ++t) {
        const size_t at = (size_t(t) * BATCH + b) * HIDDEN + own;
        if (has_unit) h[at] = 0;
        if (has_unit && output) output[at] = 0;
    }
    if (has_unit && end < work.num_steps) *state = cell;
}

// Grid: HIDDEN / UNITS for each layer.
#if CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTERS
#endif
extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1)
lstm_backward(const __grid_constant__ Work work) {
    constexpr int BLOCKS = HIDDEN / UNITS;
    constexpr int INNER = 4 * HIDDEN, PART = INNER / CLUSTER, VECTORS = PART / WARPS / 32;
    constexpr int ROWS = CLUSTER * UNITS, TILES = ROWS / 16;
    __shared__ float partial[2][WARPS][ROWS][BATCH];
    __shared__ float2 found[2][CLUSTER][UNITS][PAIRS];  // from each block of the cluster
    __shared__ Barrier arrivals[2];
    const Layer& layer = work.layers[blockIdx.x / BLOCKS];
    const Half *grad = layer.given, *weights = layer.weights, *cells = layer.cells, *gates = layer.gates;
    Half* grad_gates = layer.grad_gates;
    const unsigned char* kept = layer.kept;
    int* status = work.status;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_unit = blockIdx.x % BLOCKS * UNITS;
    const int rank = blockIdx.x % CLUSTER, first_row = first_unit - rank * UNITS;
    const int inner = rank * PART + warp * (PART / WARPS) + lane % 4 * 8;
    const int needed = steps_needed(work), first = layer.first, end = layer.end, stop = clamp(needed, first, end);
    // The first step that hears of the one after it.
    const int first_to_hear = stop < needed ? stop - 1 : stop - 2;
    // Of the warp, and of the thread.
    unsigned patience = PATIENCE, own_patience = PATIENCE;

    unsigned a[VECTORS][2][TILES][4];
    load_weights<TILES, VECTORS>(a, [=](int row, int v) {
        // Down a column, once a launch, in place of a transposed copy.
        const Half* from = weights + size_t(inner + v * 32) * HIDDEN + first_row + row;
        unsigned words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Half low = load_once(from + 2 * i * HIDDEN), high = load_once(from + (2 * i + 1) * HIDDEN);
            words[i] = low | unsigned(high) << 16;
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    });
    if (CLUSTER > 1) {
        if (threadIdx.x < 2) make_barrier(&arrivals[threadIdx.x]);
        // Nobody sends to a block that has not begun.
        meet_cluster();
    }

    const int b = threadIdx.x % BATCH, unit = threadIdx.x / BATCH, own = first_unit + unit;
    const bool has_unit = unit < UNITS;
    const bool is_even = unit % 2 == 0;
    // The even one writes gates i and f of both, the odd one g and o.
    // Without time steps it may be before the beginning, and is not used.
    Half* to = grad_gates + ((long long)(stop - 1) * BATCH + b) * INNER + (is_even ? own : 2 * HIDDEN + own - 1);
    // Of step t: its gates, gradient and cell before it are loaded in the step before.
    uint2 next_gates = {};
    Half next_grad = 0, next_cell = 0;
    float cell = 0, grad_cell = 0, next_scale = 1, sums[4] = {};
    float* state = layer.state + b * HIDDEN + own;
    // Other stretches have gone before this one.
    const bool goes_on = end < work.num_steps;
    const auto load = [&](int t) {
        const size_t at = (size_t(t) * BATCH + b) * HIDDEN + own;
        next_gates = *reinterpret_cast<const uint2*>(gates + at * 4);
        next_grad = grad[at];
        next_cell = t > 0 ? cells[at - BATCH * HIDDEN] : Half(0);
        if (kept) next_scale = kept[at] ? work.scale : 0.0f;
    };
    for (int t = stop; t < end; ++t) {
        if (has_unit) {
#pragma unroll
            for (int q = 0; q < 4; ++q) grad_gates[(size_t(t) * BATCH + b) * INNER + q * HIDDEN + own] = 0;
        }
    }
    if (has_unit && goes_on) grad_cell = *state;
    if (has_unit && first < stop) {
        cell = to_float(cells[(size_t(stop - 1) * BATCH + b) * HIDDEN + own]);
        load(stop - 1);
    }
    for (int t = stop - 1; t >= first; --t) {
        const float i = to_float(Half(next_gates.x)), g = to_float(Half(next_gates.y));
        const float f = to_float(Half(next_gates.x >> 16)), o = to_float(Half(next_gates.y >> 16));
        float grad_h = to_float(next_grad) * next_scale;
        const float previous = to_float(next_cell), tanh_cell = hyperbolic_tangent(cell);
        cell = previous;
        if (has_unit && t > first) load(t - 1);
        // All that does not wait for the other blocks.
        float to_o = tanh_cell * o * (1.0f - o), to_cell = o * (1.0f - tanh_cell * tanh_cell);
        float to_i = g * i * (1.0f - i), to_f = previous * f * (1.0f - f), to_g = i * (1.0f - g * g);
        settle(to_o), settle(to_cell), settle(to_i), settle(to_f), settle(to_g);
        if (t + 1 < needed) {
            // All of the block have seen what this barrier was for before, two steps ago.
            if (CLUSTER > 1 && threadIdx.x == 0) expect(&arrivals[t % 2], sizeof found[0]);
            const Half* from = grad_gates + (size_t(t + 1) * BATCH + lane / 4) * INNER + inner;
            multiply<TILES, VECTORS>(a, reinterpret_cast<const uint4*>(from), partial[t % 2][warp], patience, status);
            __syncthreads();
            if (CLUSTER > 1) {
                const int row = threadIdx.x / PAIRS, pair = threadIdx.x % PAIRS;
                if (row < ROWS) {
                    float2 sum = {};
#pragma unroll
                    for (int w = 0; w < WARPS; ++w) {
                        const float2 part = *reinterpret_cast<float2*>(&partial[t % 2][w][row][2 * pair]);
                        sum.x += part.x, sum.y += part.y;
                    }
                    float2* to = &found[t % 2][rank][row % UNITS][pair];
                    send(sum, to, &arrivals[t % 2], row / UNITS);
                }
            }
            if (has_unit && CLUSTER > 1) {
                while (!has_arrived(&arrivals[t % 2], (first_to_hear - t) / 2 % 2)) {
                    if (own_patience == 0) {
                        *status = 1;
                        grad_h = to_float(Half(NANS));
                        break;
                    }
                    --own_patience;
                }
#pragma unroll
                for (int r = 0; r < CLUSTER; ++r) grad_h += reinterpret_cast<float*>(found[t % 2][r][unit])[b];
            } else if (has_unit) {
#pragma unroll
                for (int w = 0; w < WARPS; ++w) grad_h += partial[t % 2][w][unit][b];
            }
        }
        if (has_unit) {
            grad_cell += grad_h * to_cell;
            const float grads[4] = {grad_cell * to_i, grad_cell * to_f, grad_cell * to_g, grad_h * to_o};
            const unsigned first = to_halves(grads[0], grads[1]), second = to_halves(grads[2], grads[3]);
            grad_cell *= f;
            const unsigned other = __shfl_xor_sync(ALL, is_even ? second : first, BATCH);
            const unsigned low = is_even ? first : other, high = is_even ? other : second;
            store_exchanged(to, (low & 0xffffu) | (high << 16));
            store_exchanged(to + HIDDEN, (low >> 16) | (high & 0xffff0000u));
            to -= BATCH * INNER;
#pragma unroll
            for (int q = 0; q < 4; ++q) sums[q] += grads[q];
        }
    }
    if (!has_unit) return;
    if (first > 0) *state = grad_cell;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
#pragma unroll
        for (int mask = 1; mask < BATCH; mask *= 2) sums[q] += __shfl_xor_sync(ALL, sums[q], mask);
        if (b > 0) continue;
        if (goes_on) sums[q] += layer.sums[q * HIDDEN + own];
        if (first > 0) layer.sums[q * HIDDEN + own] = sums[q];
        else layer.grad_bias[q * HIDDEN + own] = Half(to_halves(sums[q], 0.0f));
    }
}
