// What every instruction set shares. Included inside each one's unnamed namespace.
#define ALWAYS_INLINE inline __attribute__((always_inline))

// bfloat16 is the upper half of a float32.
struct bf16 {
  uint16_t bits;
};

// 2^r = 1 + r (k[0] + r (k[1] + ...)) for r in [0, 1]: minimax, 1e-7 relative, exact at 0.
constexpr float kExp2[5] = {0.6931512951850891f, 0.24016448855400085f, 0.05579981207847595f, 0.009017146192491055f,
                            0.0018670842982828617f};
