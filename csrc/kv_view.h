// How every kernel addresses rows. Plain structs without torch headers, shared by the CPU and CUDA kernels.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define KVOPS_HOST_DEVICE __host__ __device__
#else
// Always inlined, so never a weak symbol: the linker would pick any one of the copies that several instruction-set
// levels emit.
#define KVOPS_HOST_DEVICE __attribute__((always_inline))
#endif

namespace kvops {

struct Call;  // call.h

constexpr int64_t kMaxHeadDim = 1024;  // CUDA kernels: one warp holds a row in registers

enum class DType : int32_t { f32, f16, bf16, e4m3, e5m2, i8 };

// fp16 and bf16 as stored: 2 bytes, converted to float for all arithmetic.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
// fp8 as stored: 1 byte. bf16 represents every fp8 value exactly, and kernels widen fp8 to bf16, so results equal those
// of bf16 rows.
struct E4M3 {
  uint8_t bits;
};
struct E5M2 {
  uint8_t bits;
};
// int8 as stored, of rows with a scale each: 1 byte, which fp32 and bf16 represent exactly.
struct Int8 {
  int8_t value;
};

// The rows of one head of one request. In dense memory they are evenly spaced; in paged memory only within a page.
struct HeadRows {
  char* data;                 // slot 0; if paged, this head in page 0
  int64_t stride_n;           // bytes from slot to slot (within a page)
  const int32_t* pages;       // the request's pages, in order; null: dense memory
  int64_t stride_page;        // bytes
  uint64_t reciprocal;        // KVView::reciprocal_of(page_size)
  uint32_t page_size, first;  // slots; if paged, the slot of row(0)
  uint32_t num_pages;         // pages in the pool

  KVOPS_HOST_DEVICE char* row(int64_t i) const {
    if (!pages) return data + i * stride_n;
    const uint32_t slot = first + static_cast<uint32_t>(i), page = page_of(slot);
    return page_at(page) + (slot - page * page_size) * stride_n;
  }
  // The same, or any valid address if row i is not `there`: the table may end before it.
  KVOPS_HOST_DEVICE char* row(int64_t i, bool there) const { return pages && !there ? data : row(i); }
  // Whether rows [i, i + count) are evenly spaced.
  KVOPS_HOST_DEVICE bool strided(int64_t i, int64_t count) const {
    if (!pages) return true;
    const uint32_t slot = first + static_cast<uint32_t>(i);
    return slot - page_of(slot) * page_size + count <= page_size;
  }
  // The rows from slot i on.
  KVOPS_HOST_DEVICE HeadRows from(int64_t i) const {
    HeadRows x = *this;
    if (pages)
      x.first += static_cast<uint32_t>(i);
    else
      x.data += i * stride_n;
    return x;
  }
  // Whether the table names a page for row i. On the CPU that has been checked already.
  KVOPS_HOST_DEVICE bool has_page(int64_t i) const {
    return !pages || entry(page_of(first + static_cast<uint32_t>(i))) < num_pages;
  }
  // slot / page_size for slots below 2^31, by a multiplication instead of a division.
  KVOPS_HOST_DEVICE uint32_t page_of(uint32_t slot) const {
#ifdef __CUDA_ARCH__
    return static_cast<uint32_t>(__umul64hi(uint64_t{slot << 1}, reciprocal));
#else
    return static_cast<uint32_t>(static_cast<unsigned __int128>(uint64_t{slot} << 1) * reciprocal >> 64);
#endif
  }
  // The start of one of the request's pages. The host does not read a table that lies on a GPU, so a page number out of
  // range is replaced by the last page: the values read there are wrong, but the access stays inside the cache.
  KVOPS_HOST_DEVICE char* page_at(uint32_t page) const {
#ifdef KVOPS_GPU
    const uint32_t named = entry(page);
    return data + static_cast<int64_t>(named < num_pages ? named : num_pages - 1) * stride_page;
#else
    return data + pages[page] * stride_page;
#endif
  }

 private:
  KVOPS_HOST_DEVICE uint32_t entry(uint32_t page) const { return static_cast<uint32_t>(pages[page]); }
};

// Walks over consecutive rows from row i on. Looks up a page when it reaches the page's first row.
struct RowWalk {
  const HeadRows rows;
  uint32_t page, skip, left;  // the next page, the rows to skip in it, and the rows left in the current one
  char* at;

  KVOPS_HOST_DEVICE RowWalk(const HeadRows& rows_, int64_t i) : rows(rows_), page(0), skip(0), left(0), at(nullptr) {
    if (!rows.pages) {
      at = rows.row(i);
      return;
    }
    const uint32_t slot = rows.first + static_cast<uint32_t>(i);
    page = rows.page_of(slot);
    skip = slot - page * rows.page_size;
  }
  KVOPS_HOST_DEVICE char* next() {
    if (rows.pages && left == 0) {
      at = rows.page_at(page++) + skip * rows.stride_n;
      left = rows.page_size - skip;
      skip = 0;
    }
    char* const row = at;
    at += rows.stride_n;
    --left;
    return row;
  }
};

// K or V, [b, Hk, n, d], with a contiguous last dim: BHND, BNHD and slices of wider tensors differ only in strides.
// With a block table the memory holds pages [num_pages, Hk, page_size, d], and slot i of request b is slot i %
// page_size of page table[b][i / page_size].
struct KVView {
  char* data;
  int64_t stride_b, stride_h, stride_n;  // bytes; if paged, stride_b is the distance between pages
  int64_t row_bytes;  // d * itemsize, a multiple of 16; for 1-byte types that are computed with, the bf16 size
  const int32_t* table = nullptr;  // [b, any], or null: dense memory
  int64_t table_stride = 0;        // elements
  int32_t page_size = 0;           // slots
  uint32_t num_pages = 0;          // pages in the pool
  uint64_t reciprocal = 0;         // reciprocal_of(page_size)

  // Whether x has the same row spacing.
  KVOPS_HOST_DEVICE bool same_strides(const KVView& x) const {
    return stride_b == x.stride_b && stride_h == x.stride_h && stride_n == x.stride_n;
  }
  static uint64_t reciprocal_of(int64_t page_size) { return (uint64_t{1} << 63) / page_size + 1; }

  // Dense memory only.
  KVOPS_HOST_DEVICE char* row(int64_t b, int64_t h, int64_t i) const {
    return data + b * stride_b + h * stride_h + i * stride_n;
  }
  KVOPS_HOST_DEVICE HeadRows head(int64_t b, int64_t h) const {
    if (!table) return {row(b, h, 0), stride_n, nullptr, 0, 0, 0, 0, 0};
    const uint32_t size = static_cast<uint32_t>(page_size);
    return {row(0, h, 0), stride_n, table + b * table_stride, stride_b, reciprocal, size, 0, num_pages};
  }
};

// The valid slots of a padded batch: row b's are [first(b), first(b) + count(b)). The host does not check values that
// lie on a GPU, so this clamps them to [0, n].
struct ValidSlots {
  const int32_t* starts;   // [b] or null: 0
  const int32_t* lengths;  // [b] or null: n - starts
  int64_t n;

  KVOPS_HOST_DEVICE int64_t first(int64_t b) const { return starts ? clamped(starts[b], n) : 0; }
  KVOPS_HOST_DEVICE int64_t count(int64_t b) const {
    const int64_t most = n - first(b);
    return lengths ? clamped(lengths[b], most) : most;
  }

 private:
  KVOPS_HOST_DEVICE static int64_t clamped(int64_t x, int64_t most) { return x < 0 ? 0 : x < most ? x : most; }
};

}  // namespace kvops
