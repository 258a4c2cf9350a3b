// How every kernel addresses rows: plain structs without a torch header, shared by the CPU and the CUDA kernels.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define KVOPS_HOST_DEVICE __host__ __device__
#else
// Never a weak symbol: of one that several instruction-set levels had, the linker would choose any.
#define KVOPS_HOST_DEVICE __attribute__((always_inline))
#endif

namespace kvops {

struct Call;  // call.h

constexpr int64_t kMaxHeadDim = 1024;  // of the CUDA kernels: one warp holds a row in registers

enum class DType : int32_t { f32, f16, bf16, e4m3, e5m2 };

// fp16 and bf16 as stored: 2 bytes, converted to float wherever they are computed with.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
// fp8 as stored: 1 byte. bf16 has all of its values, and each is read as that one: results are those of bf16 rows.
struct E4M3 {
  uint8_t bits;
};
struct E5M2 {
  uint8_t bits;
};

// The rows of one head of one request. In dense memory they are equally far apart, in pages only within a page.
struct HeadRows {
  char* data;                 // slot 0; with pages, this head in page 0
  int64_t stride_n;           // bytes from slot to slot (of a page)
  const int32_t* pages;       // of the request, in order; null: dense memory
  int64_t stride_page;        // bytes
  uint64_t reciprocal;        // KVView::reciprocal_of(page_size)
  uint32_t page_size, first;  // slots; with pages, the slot that row(0) is
  uint32_t num_pages;         // that there are

  KVOPS_HOST_DEVICE char* row(int64_t i) const {
    if (!pages) return data + i * stride_n;
    const uint32_t slot = first + static_cast<uint32_t>(i), page = page_of(slot);
    return page_at(page) + (slot - page * page_size) * stride_n;
  }
  // The same, or any address where row i is not `there`: the table may end before it.
  KVOPS_HOST_DEVICE char* row(int64_t i, bool there) const { return pages && !there ? data : row(i); }
  // Whether rows [i, i + count) are equally far apart.
  KVOPS_HOST_DEVICE bool strided(int64_t i, int64_t count) const {
    if (!pages) return true;
    const uint32_t slot = first + static_cast<uint32_t>(i);
    return slot - page_of(slot) * page_size + count <= page_size;
  }
  // From slot i on.
  KVOPS_HOST_DEVICE HeadRows from(int64_t i) const {
    HeadRows x = *this;
    if (pages)
      x.first += static_cast<uint32_t>(i);
    else
      x.data += i * stride_n;
    return x;
  }
  // Does the table name a page for row i? On the CPU that has been checked.
  KVOPS_HOST_DEVICE bool has_page(int64_t i) const {
    return !pages || entry(page_of(first + static_cast<uint32_t>(i))) < num_pages;
  }
  // slot / page_size, for slots below 2^31: a product instead of a division.
  KVOPS_HOST_DEVICE uint32_t page_of(uint32_t slot) const {
#ifdef __CUDA_ARCH__
    return static_cast<uint32_t>(__umul64hi(uint64_t{slot << 1}, reciprocal));
#else
    return static_cast<uint32_t>(static_cast<unsigned __int128>(uint64_t{slot} << 1) * reciprocal >> 64);
#endif
  }
  // Where a page of the request begins. A table on a GPU is not read on the host, so one that does not exist is taken
  // for the last one: what is read there is wrong, but it is inside of the cache.
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

// One row after the other, from row i on. A page is looked up when its first row is asked for.
struct RowWalk {
  const HeadRows rows;
  uint32_t page, skip, left;  // the next page, its rows to be left out, and what is left of the one in hand
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

// K or V, [b, Hk, n, d], the last dim contiguous: BHND, BNHD and slices of wider tensors are all strides. With a block
// table the memory is pages [num_pages, Hk, page_size, d], and slot i of request b is slot i % page_size of page
// table[b][i / page_size].
struct KVView {
  char* data;
  int64_t stride_b, stride_h, stride_n;  // bytes; stride_b from page to page if there are pages
  int64_t row_bytes;                     // d * itemsize, a multiple of 16; of fp8 that is computed with, as bf16
  const int32_t* table = nullptr;        // [b, any], or null: dense memory
  int64_t table_stride = 0;              // elements
  int32_t page_size = 0;                 // slots
  uint32_t num_pages = 0;                // that there are
  uint64_t reciprocal = 0;               // reciprocal_of(page_size)

  // Whether its rows are as far apart as those of x.
  KVOPS_HOST_DEVICE bool same_strides(const KVView& x) const {
    return stride_b == x.stride_b && stride_h == x.stride_h && stride_n == x.stride_n;
  }
  static uint64_t reciprocal_of(int64_t page_size) { return (uint64_t{1} << 63) / page_size + 1; }

  // Of dense memory.
  KVOPS_HOST_DEVICE char* row(int64_t b, int64_t h, int64_t i) const {
    return data + b * stride_b + h * stride_h + i * stride_n;
  }
  KVOPS_HOST_DEVICE HeadRows head(int64_t b, int64_t h) const {
    if (!table) return {row(b, h, 0), stride_n, nullptr, 0, 0, 0, 0, 0};
    const uint32_t size = static_cast<uint32_t>(page_size);
    return {row(0, h, 0), stride_n, table + b * table_stride, stride_b, reciprocal, size, 0, num_pages};
  }
};

// Which slots of a padded batch hold tokens: row b's are [first(b), first(b) + count(b)). What lies on a GPU is not
// checked on the host, so values out of range are clamped to [0, n] here.
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
