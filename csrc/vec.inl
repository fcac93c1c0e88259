// What every instruction set shares. Included inside each one's unnamed namespace.
#define ALWAYS_INLINE inline __attribute__((always_inline))

// bfloat16 is the upper half of a float32.
struct bf16 {
  uint16_t bits;
};

// 2^r = 1 + r (k[0] + r (k[1] + ...)) for r in [-1/2, 1/2]: minimax, 1e-7 relative, exact at 0.
constexpr float kExp2[5] = {0.6931470036506653f, 0.24022242426872253f, 0.05550732463598251f, 0.009671499952673912f,
                            0.0013265118468552828f};
