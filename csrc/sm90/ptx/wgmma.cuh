// Tensor-core multiply-accumulate of one warpgroup (four warps), asynchronous.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flash_attn::sm90::ptx {

// wgmma.fence, PTX ISA "wgmma.fence": orders this warpgroup's accesses to registers and shared
// memory before its next wgmma. Needed before the first one of a batch.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// wgmma.commit_group: closes the group of the warpgroup's products since the last commit.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// wgmma.wait_group: until at most kPending of the youngest groups are still under way. Before that
// their accumulators and register operands must not be touched, not even read.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// No instruction: the compiler can move no access to the value across this point.
__device__ __forceinline__ void pin(float& value) { asm volatile("" : "+f"(value)::"memory"); }
__device__ __forceinline__ void pin(uint32_t& value) { asm volatile("" : "+r"(value)::"memory"); }

// Which dimension of an operand in shared memory has neighbouring elements: k, or m (of a) and n
// (of b), which the instruction calls transposed.
enum class Major : uint8_t { kK, kMn };

// wgmma.mma_async m64nNk16, PTX ISA "wgmma.mma_async": d = a · b (+ d if accumulate), fp32
// accumulators. The layout of d and of a in registers is that of tile/fragment.cuh, 16 rows a warp;
// descriptors of shared memory: tile/gemm.cuh. kN: columns of b and d.
template <typename Element, int kN>
struct Wgmma {
  // a and b in shared memory.
  template <Major kMajorA, Major kMajorB>
  __device__ static void ss(float (&d)[kN / 8][4], uint64_t a, uint64_t b, int accumulate);
  // a in registers; b in shared memory.
  template <Major kMajorB>
  __device__ static void rs(float (&d)[kN / 8][4], const uint32_t (&a)[4], uint64_t b,
                            int accumulate);
};

// The operand lists: FLASH_ATTN_Ti names the registers of 16·i columns in the text, FLASH_ATTN_Di
// binds them. nvcc has no named asm operands, so each shape brings the numbers behind its
// accumulators.
#define FLASH_ATTN_T1 "%0,%1,%2,%3,%4,%5,%6,%7"
#define FLASH_ATTN_T2 FLASH_ATTN_T1 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define FLASH_ATTN_T3 FLASH_ATTN_T2 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define FLASH_ATTN_T4 FLASH_ATTN_T3 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define FLASH_ATTN_T5 FLASH_ATTN_T4 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define FLASH_ATTN_T6 FLASH_ATTN_T5 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define FLASH_ATTN_T7 FLASH_ATTN_T6 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define FLASH_ATTN_T8 FLASH_ATTN_T7 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define FLASH_ATTN_T9 FLASH_ATTN_T8 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define FLASH_ATTN_T10 FLASH_ATTN_T9 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define FLASH_ATTN_T11 FLASH_ATTN_T10 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define FLASH_ATTN_T12 FLASH_ATTN_T11 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define FLASH_ATTN_T13 FLASH_ATTN_T12 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define FLASH_ATTN_T14 FLASH_ATTN_T13 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define FLASH_ATTN_T15 FLASH_ATTN_T14 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define FLASH_ATTN_T16 FLASH_ATTN_T15 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define FLASH_ATTN_D(i)                                                       \
  "+f"(d[2 * i][0]), "+f"(d[2 * i][1]), "+f"(d[2 * i][2]), "+f"(d[2 * i][3]), \
      "+f"(d[2 * i + 1][0]), "+f"(d[2 * i + 1][1]), "+f"(d[2 * i + 1][2]), "+f"(d[2 * i + 1][3])
#define FLASH_ATTN_D1 FLASH_ATTN_D(0)
#define FLASH_ATTN_D2 FLASH_ATTN_D1, FLASH_ATTN_D(1)
#define FLASH_ATTN_D3 FLASH_ATTN_D2, FLASH_ATTN_D(2)
#define FLASH_ATTN_D4 FLASH_ATTN_D3, FLASH_ATTN_D(3)
#define FLASH_ATTN_D5 FLASH_ATTN_D4, FLASH_ATTN_D(4)
#define FLASH_ATTN_D6 FLASH_ATTN_D5, FLASH_ATTN_D(5)
#define FLASH_ATTN_D7 FLASH_ATTN_D6, FLASH_ATTN_D(6)
#define FLASH_ATTN_D8 FLASH_ATTN_D7, FLASH_ATTN_D(7)
#define FLASH_ATTN_D9 FLASH_ATTN_D8, FLASH_ATTN_D(8)
#define FLASH_ATTN_D10 FLASH_ATTN_D9, FLASH_ATTN_D(9)
#define FLASH_ATTN_D11 FLASH_ATTN_D10, FLASH_ATTN_D(10)
#define FLASH_ATTN_D12 FLASH_ATTN_D11, FLASH_ATTN_D(11)
#define FLASH_ATTN_D13 FLASH_ATTN_D12, FLASH_ATTN_D(12)
#define FLASH_ATTN_D14 FLASH_ATTN_D13, FLASH_ATTN_D(13)
#define FLASH_ATTN_D15 FLASH_ATTN_D14, FLASH_ATTN_D(14)
#define FLASH_ATTN_D16 FLASH_ATTN_D15, FLASH_ATTN_D(15)

// Two chunks of 16 columns and a half: half of a head dim of 80 is 40 columns.
// T2H and D2H are to T2 and D2 what T3 and D3 are, with 8 columns for 16.
#define FLASH_ATTN_T2H FLASH_ATTN_T2 ",%16,%17,%18,%19"
#define FLASH_ATTN_D2H FLASH_ATTN_D2, "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3])

#define FLASH_ATTN_WGMMA(Element, type, columns, chunks, r0, r1, r2, r3, r4, r5, r6)              \
  template <>                                                                                     \
  struct Wgmma<Element, columns> {                                                                \
    template <Major kMajorA, Major kMajorB>                                                       \
    __device__ __forceinline__ static void ss(float (&d)[columns / 8][4], uint64_t a, uint64_t b, \
                                              int accumulate) {                                   \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #r2                                       \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type    \
                   " {" FLASH_ATTN_T##chunks "}, %" #r0 ", %" #r1 ", p, 1, 1, %" #r3 ", %" #r4    \
                                             ";\n}"                                               \
                   : FLASH_ATTN_D##chunks                                                         \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(kMajorA == Major::kMn),                 \
                     "n"(kMajorB == Major::kMn)                                                   \
                   : "memory");                                                                   \
    }                                                                                             \
    template <Major kMajorB>                                                                      \
    __device__ __forceinline__ static void rs(float (&d)[columns / 8][4], const uint32_t (&a)[4], \
                                              uint64_t b, int accumulate) {                       \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #r5                                       \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type    \
                   " {" FLASH_ATTN_T##chunks "}, {%" #r0 ",%" #r1 ",%" #r2 ",%" #r3 "}, %" #r4    \
                                             ", p, 1, 1, %" #r6 ";\n}"                            \
                   : FLASH_ATTN_D##chunks                                                         \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),         \
                     "n"(kMajorB == Major::kMn)                                                   \
                   : "memory");                                                                   \
    }                                                                                             \
  };
#define FLASH_ATTN_WGMMA_BOTH(...)             \
  FLASH_ATTN_WGMMA(__half, "f16", __VA_ARGS__) \
  FLASH_ATTN_WGMMA(__nv_bfloat16, "bf16", __VA_ARGS__)

FLASH_ATTN_WGMMA_BOTH(32, 2, 16, 17, 18, 19, 20, 21, 22)
FLASH_ATTN_WGMMA_BOTH(40, 2H, 20, 21, 22, 23, 24, 25, 26)
FLASH_ATTN_WGMMA_BOTH(48, 3, 24, 25, 26, 27, 28, 29, 30)
FLASH_ATTN_WGMMA_BOTH(64, 4, 32, 33, 34, 35, 36, 37, 38)
FLASH_ATTN_WGMMA_BOTH(80, 5, 40, 41, 42, 43, 44, 45, 46)
FLASH_ATTN_WGMMA_BOTH(96, 6, 48, 49, 50, 51, 52, 53, 54)
FLASH_ATTN_WGMMA_BOTH(112, 7, 56, 57, 58, 59, 60, 61, 62)
FLASH_ATTN_WGMMA_BOTH(128, 8, 64, 65, 66, 67, 68, 69, 70)
FLASH_ATTN_WGMMA_BOTH(160, 10, 80, 81, 82, 83, 84, 85, 86)
FLASH_ATTN_WGMMA_BOTH(192, 12, 96, 97, 98, 99, 100, 101, 102)
FLASH_ATTN_WGMMA_BOTH(256, 16, 128, 129, 130, 131, 132, 133, 134)

#undef FLASH_ATTN_WGMMA_BOTH
#undef FLASH_ATTN_WGMMA
#undef FLASH_ATTN_D
#undef FLASH_ATTN_T2H
#undef FLASH_ATTN_D2H
#undef FLASH_ATTN_T1
#undef FLASH_ATTN_D1
#undef FLASH_ATTN_T2
#undef FLASH_ATTN_D2
#undef FLASH_ATTN_T3
#undef FLASH_ATTN_D3
#undef FLASH_ATTN_T4
#undef FLASH_ATTN_D4
#undef FLASH_ATTN_T5
#undef FLASH_ATTN_D5
#undef FLASH_ATTN_T6
#undef FLASH_ATTN_D6
#undef FLASH_ATTN_T7
#undef FLASH_ATTN_D7
#undef FLASH_ATTN_T8
#undef FLASH_ATTN_D8
#undef FLASH_ATTN_T9
#undef FLASH_ATTN_D9
#undef FLASH_ATTN_T10
#undef FLASH_ATTN_D10
#undef FLASH_ATTN_T11
#undef FLASH_ATTN_D11
#undef FLASH_ATTN_T12
#undef FLASH_ATTN_D12
#undef FLASH_ATTN_T13
#undef FLASH_ATTN_D13
#undef FLASH_ATTN_T14
#undef FLASH_ATTN_D14
#undef FLASH_ATTN_T15
#undef FLASH_ATTN_D15
#undef FLASH_ATTN_T16
#undef FLASH_ATTN_D16

}  // namespace flash_attn::sm90::ptx
