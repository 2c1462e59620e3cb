// Writes synthetic tensors and sums tensors up. tensors.ptx is made from this file; see tensors.rs.
//
// Tensors begin at multiples of 16 bytes and are taken as words of 64 bits, the last one filled up
// with zeros, counted from 1.

typedef unsigned int u32;
typedef unsigned long long u64;

#define GAMMA 0x9e3779b97f4a7c15ull
#define MULTIPLIER 0xd6e8feb86659fd93ull
#define FULL_WARP 0xffffffffu
#define WARPS 16 // of a block that sums up

struct Piece {
    u64 at;
    u64 len;
};

struct Pieces {
    u64 *sums;   // one a piece, on the device; zero between launches
    u32 *blocks; // how many blocks are done, on the device; zero between launches
    u64 *found;  // where the last block writes the sums, in host memory
    u32 *done;   // and then the ticket
    u32 count;
    u32 ticket;
    Piece list[64];
};

// Loads that are not kept: every byte is used once.
__device__ __forceinline__ ulonglong2 load_once(u64 at) {
    ulonglong2 v;
    asm volatile("ld.global.L1::no_allocate.v2.u64 {%0, %1}, [%2];"
                 : "=l"(v.x), "=l"(v.y)
                 : "l"(at)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store(u64 at, u64 x, u64 y) {
    asm volatile("st.global.cs.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(x), "l"(y) : "memory");
}

// Four finite bfloat16 numbers of a counter.
__device__ __forceinline__ u64 four_bfloat16(u64 z) {
    z = (z ^ (z >> 32)) * MULTIPLIER;
    z ^= z >> 32;
    return (z & 0x80ff80ff80ff80ffull) | 0x3e003e003e003e00ull;
}

__device__ __forceinline__ u64 mix(u64 x) {
    x = (x ^ (x >> 32)) * MULTIPLIER;
    x = (x ^ (x >> 32)) * MULTIPLIER;
    return x ^ (x >> 32);
}

// Word number n of the tensor is made of the counter plus n times GAMMA.
extern "C" __global__ void __launch_bounds__(512) write_synthetic(u64 at, u64 len, u64 counter) {
    const u64 threads = (u64)gridDim.x * blockDim.x;
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 vectors = len / 16;
    u64 word = counter + (2 * thread + 1) * GAMMA;
    for (u64 v = thread; v < vectors; v += threads) {
        store(at + 16 * v, four_bfloat16(word), four_bfloat16(word + GAMMA));
        word += 2 * threads * GAMMA;
    }
    // The bytes behind the last whole vector, one a thread.
    const u64 byte = vectors * 16 + thread;
    if (byte < len) {
        const u64 made = four_bfloat16(counter + (byte / 8 + 1) * GAMMA);
        *(unsigned char *)(at + byte) = made >> (byte % 8 * 8);
    }
}

// What one block sums up of a piece; for its first thread.
__device__ __forceinline__ u64 sum_of_block(const Piece piece) {
    const u64 threads = (u64)gridDim.x * blockDim.x;
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 vectors = piece.len / 16;
    const u64 step = 2 * threads * GAMMA;
    u64 sum = 0, place = (2 * thread + 1) * GAMMA, v = thread;
    for (; v + 3 * threads < vectors; v += 4 * threads) {
        ulonglong2 w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = load_once(piece.at + 16 * (v + i * threads));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum += mix(w[i].x ^ place) + mix(w[i].y ^ (place + GAMMA));
            place += step;
        }
    }
    for (; v < vectors; v += threads) {
        const ulonglong2 w = load_once(piece.at + 16 * v);
        sum += mix(w.x ^ place) + mix(w.y ^ (place + GAMMA));
        place += step;
    }
    if (thread == 0) {
        sum += mix(piece.len);
        for (u64 byte = vectors * 16; byte < piece.len; byte += 8) {
            u64 word = 0;
            for (u64 i = byte; i < byte + 8 && i < piece.len; i++)
                word |= (u64) * (const unsigned char *)(piece.at + i) << (i - byte) * 8;
            sum += mix(word ^ (byte / 8 + 1) * GAMMA);
        }
    }
    for (int half = 16; half > 0; half /= 2) sum += __shfl_down_sync(FULL_WARP, sum, half);
    __shared__ u64 of_warps[WARPS];
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int i = 1; i < WARPS; i++) sum += of_warps[i];
    return sum;
}

// Finds the sum of every piece: of what mix gives of each word, xored with its number times GAMMA,
// and of the length. Blocks of a row of the grid share one piece.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
    sum_mixed(const __grid_constant__ Pieces pieces) {
    const Piece piece = pieces.list[blockIdx.y];
    if (blockIdx.x == 0 || (u64)blockIdx.x * blockDim.x < piece.len / 16) {
        const u64 sum = sum_of_block(piece);
        if (threadIdx.x == 0) atomicAdd(&pieces.sums[blockIdx.y], sum);
    }
    if (threadIdx.x == 0) {
        __threadfence(); // the sum, before the block counts as done
        if (atomicAdd(pieces.blocks, 1) == gridDim.x * gridDim.y - 1) {
            __threadfence();
            volatile u64 *sums = pieces.sums;
            for (u32 i = 0; i < pieces.count; i++) {
                ((volatile u64 *)pieces.found)[i] = sums[i];
                sums[i] = 0;
            }
            *(volatile u32 *)pieces.blocks = 0;
            __threadfence_system();
            *(volatile u32 *)pieces.done = pieces.ticket;
        }
    }
}
