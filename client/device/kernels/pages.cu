// Scattered pages into contiguous blocks and back, 16 bytes a thread.
//
// A grid strides over tiles; a tile is the part of one page of one plane that some threads copy. Blocks may be in host memory
// that is mapped for the device, in a staging buffer, or in a pool on the device: an address is an address.

#include <cstdint>

// One page's place in a block; `larder_device::order::PageCopy` with addresses.
struct Entry {
    // The address of this page in the block's plane 0.
    uint64_t block;
    uint32_t page;
    uint32_t reserved;
};

struct Plane {
    // The address of page 0.
    uint64_t pages;
    uint64_t page_stride;
};

// Passed by value; units are 16 bytes. `src/cuda/tables.rs` has the same.
struct Copy {
    const Entry *entries;
    const Plane *planes;
    // From one plane to the next within a block, in bytes.
    uint64_t plane_bytes;
    // From run to run, innermost last, in bytes.
    uint64_t outer_stride;
    uint64_t inner_stride;
    uint32_t entry_count;
    uint32_t first_plane;
    uint32_t plane_count;
    uint32_t page_units;
    uint32_t run_units;
    uint32_t inner_count;
};

constexpr int THREADS = 256;
constexpr int LOADS = 4;
constexpr uint32_t TILE_UNITS = THREADS * LOADS;

// Bytes that pass once are kept out of the cache.
__device__ __forceinline__ uint4 load(const uint4 *from) { return __ldcs(from); }

__device__ __forceinline__ void store(uint4 *to, uint4 value) { __stcs(to, value); }

// The offset of unit `unit` of a page.
__device__ __forceinline__ uint64_t in_page(const Copy &copy, uint32_t unit) {
    if (copy.run_units == copy.page_units) {
        return uint64_t(unit) * 16;
    }
    const uint32_t run = unit / copy.run_units;
    const uint32_t in_run = unit - run * copy.run_units;
    const uint32_t outer = run / copy.inner_count;
    const uint32_t inner = run - outer * copy.inner_count;
    return outer * copy.outer_stride + inner * copy.inner_stride + uint64_t(in_run) * 16;
}

template <bool TO_BLOCKS>
__device__ __forceinline__ void copy_pages(const Copy &copy) {
    const uint32_t tiles_of_page = (copy.page_units + TILE_UNITS - 1) / TILE_UNITS;
    const uint64_t tiles = uint64_t(copy.entry_count) * copy.plane_count * tiles_of_page;
    for (uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        // Neighboring tiles are neighbors in the block: entry after entry of one plane lie together there.
        const uint64_t page = tile / tiles_of_page;
        const uint32_t part = uint32_t(tile - page * tiles_of_page);
        const uint32_t plane_number = uint32_t(page / copy.entry_count);
        const Entry entry = copy.entries[uint32_t(page - uint64_t(plane_number) * copy.entry_count)];
        const uint32_t plane_index = copy.first_plane + plane_number;
        const Plane plane = copy.planes[plane_index];
        const uint64_t paged = plane.pages + uint64_t(entry.page) * plane.page_stride;
        const uint64_t block = entry.block + uint64_t(plane_index) * copy.plane_bytes;

        const uint32_t first = part * TILE_UNITS + threadIdx.x;
        uint4 values[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const uint32_t unit = first + i * THREADS;
            if (unit < copy.page_units) {
                const uint64_t from = TO_BLOCKS ? paged + in_page(copy, unit) : block + uint64_t(unit) * 16;
                values[i] = load(reinterpret_cast<const uint4 *>(from));
            }
        }
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const uint32_t unit = first + i * THREADS;
            if (unit < copy.page_units) {
                const uint64_t to = TO_BLOCKS ? block + uint64_t(unit) * 16 : paged + in_page(copy, unit);
                store(reinterpret_cast<uint4 *>(to), values[i]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) larder_pages_to_blocks(const __grid_constant__ Copy copy) {
    copy_pages<true>(copy);
}

extern "C" __global__ void __launch_bounds__(THREADS) larder_blocks_to_pages(const __grid_constant__ Copy copy) {
    copy_pages<false>(copy);
}
