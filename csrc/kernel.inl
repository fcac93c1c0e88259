// The kernels, written once over a vector type. Each instruction set's file defines `Vec` in its own unnamed
// namespace and includes this text, so that no function compiled for a new processor is ever shared with an old one.
//
// Two rules keep a cut text's numbers equal bit for bit: multiply-adds are asked for by name (the compiler may not
// fuse others: -ffp-contract=off), and every hidden unit takes the same operations whichever lane, block or thread
// it lands in.

using undertow::Highway;
using undertow::kChunk;
using undertow::kMaxWidth;
using undertow::Problem;

constexpr float kMinusLog2e = -1.44269504088896340736f;

// What lies this many blocks ahead is asked for early, at the end of a row from the next one: the hardware follows a
// row, but not the jump to the next.
constexpr int64_t kAhead = 8;

// sigmoid(a) from t = -a / ln 2, as 1 / (1 + 2^t). 2^t may well be infinite; NaN passes through.
ALWAYS_INLINE Vec sigmoid_from(Vec t) { return reciprocal(exp2(t) + Vec::set(1.0f)); }

// Near zero 2 / (1 + e^-2a) - 1 would cancel, so there an odd polynomial is taken (minimax, 5e-9 for a^2 < 0.4).
ALWAYS_INLINE Vec tanh_of(Vec a) {
  const Vec s = a * a;
  Vec p = Vec::set(-0.005660786293447018f);
  p = fma(p, s, Vec::set(0.02060200460255146f));
  p = fma(p, s, Vec::set(-0.05372922867536545f));
  p = fma(p, s, Vec::set(0.13331328332424164f));
  p = fma(p, s, Vec::set(-0.33333277702331543f));
  const Vec near = fma(p * s, a, a);
  const Vec far = fma(Vec::set(2.0f), sigmoid_from(a * Vec::set(2.0f * kMinusLog2e)), Vec::set(-1.0f));
  return select_less(s, Vec::set(0.4f), near, far);
}

// A register of float32 is one vector; a register of bfloat16 holds two, the even elements and the odd ones, which is
// the cheapest way to widen and narrow them. So units are dealt out to vectors in the same way: element i of a block
// of `Pack<E>::size` belongs to vector i % n, lane i / n.
template <class E>
struct Pack {
  static constexpr int n = sizeof(float) / sizeof(E), size = n * Vec::lanes;
  Vec v[n];
};

// With Tail only the first `count` elements are touched: what lies behind is another unit's, or nobody's.
template <bool Tail, class E>
ALWAYS_INLINE Pack<E> get(const E* p, int count) {
  Pack<E> a;
  if constexpr (Tail) load_n(p, a.v, count);
  else load(p, a.v);
  return a;
}

template <bool Tail, bool Stream, class E>
ALWAYS_INLINE void put(E* p, const Pack<E>& a, int count) {
  if constexpr (Tail) store_n(p, a.v, count);
  else if constexpr (Stream) stream(p, a.v);
  else store(p, a.v);
}

template <class E>
ALWAYS_INLINE void prefetch(const E* p) {
  __builtin_prefetch(p, 0, 3);
}

template <class E>
ALWAYS_INLINE void prefetch_far(const E* p) {
  __builtin_prefetch(p, 0, 2);
}

// What one vector of units keeps over time, side by side: as separate arrays a power of two apart they, and the rows
// of u, would all fall into the same few sets of the cache. The gates' parameters are scaled by -1 / ln 2, which makes
// exp a bare 2^t.
struct alignas(4 * Vec::lanes) Unit {
  float c[Vec::lanes], wf[Vec::lanes], bf[Vec::lanes], wr[Vec::lanes], br[Vec::lanes], m[Vec::lanes];
};

// The same for the way back: the gradient of c, the parameters' gradients of this chunk (weights, then biases), and
// apart those of all chunks so far. Summing in two steps keeps the rounding error of long texts small.
struct alignas(4 * Vec::lanes) GradUnit {
  float dc[Vec::lanes], chunk[4][Vec::lanes];
};
struct alignas(4 * Vec::lanes) GradTotal {
  float sums[4][Vec::lanes];
};

// A step's state before it and gates, kept from the chunk's way forth for its way back.
struct alignas(4 * Vec::lanes) Step {
  float c[Vec::lanes], f[Vec::lanes], r[Vec::lanes];
};
static_assert(2 * sizeof(Step) * kChunk == undertow::kScratch * sizeof(float) * Vec::lanes, "scratch per unit");

template <class E, class U>
ALWAYS_INLINE float& slot(U* units, float (U::*member)[Vec::lanes], int64_t i) {
  const int64_t in_block = i % Pack<E>::size;
  return (units[i / Pack<E>::size * Pack<E>::n + in_block % Pack<E>::n].*member)[in_block / Pack<E>::n];
}

// NaN in its plainest form: rounding another one to bfloat16 could carry it over into zero.
inline float plain(float a) { return a == a ? a : __builtin_nanf(""); }

template <class E>
void fill(Unit* units, const Problem& p, int64_t b, int64_t j0, int64_t width) {
  for (int64_t i = 0; i < width || i % Pack<E>::size; ++i) {
    const int64_t j = j0 + i;
    const bool there = i < width;
    slot<E>(units, &Unit::c, i) = there && p.c0 ? plain(p.c0[b * p.d + j]) : 0.0f;
    slot<E>(units, &Unit::wf, i) = there ? plain(p.weight[j] * kMinusLog2e) : 0.0f;
    slot<E>(units, &Unit::wr, i) = there ? plain(p.weight[p.d + j] * kMinusLog2e) : 0.0f;
    slot<E>(units, &Unit::bf, i) = there ? plain(p.bias[j] * kMinusLog2e) : 0.0f;
    slot<E>(units, &Unit::br, i) = there ? plain(p.bias[p.d + j] * kMinusLog2e) : 0.0f;
    slot<E>(units, &Unit::m, i) = there && p.mask ? plain(p.mask[b * p.d + j]) : 1.0f;
  }
}

ALWAYS_INLINE Vec gate(Vec u, Vec c, const float* weight, const float* bias) {
  return sigmoid_from(fma(u, Vec::set(kMinusLog2e), fma(load(weight), c, load(bias))));
}

// Where everything of step s of row b lies.
template <class E>
struct At {
  int64_t t;
  const E *u, *x, *gh;
  bool padded = false, reset = false;

  At(const Problem& p, int64_t b, int64_t s, int64_t j0, bool masked) : t(p.reverse ? p.T - 1 - s : s) {
    u = static_cast<const E*>(p.u) + b * p.u_b + t * p.u_t + j0;
    x = static_cast<const E*>(p.x) + b * p.x_b + t * p.x_t + j0;
    gh = static_cast<const E*>(p.grad_h) + b * p.gh_b + t * p.gh_t + j0;
    if (masked) {
      padded = p.padding && p.padding[b * p.T + t];
      reset = p.resets && p.resets[b * p.T + t] && !padded;
    }
  }
};

template <class U>
void clear(U* units, int64_t vectors, float (U::*member)[Vec::lanes]) {
  for (int64_t v = 0; v < vectors; ++v) store(units[v].*member, Vec::set(0.0f));
}

template <class E>
void put_state(const Unit* units, float* to, int64_t width) {
  constexpr int64_t size = Pack<E>::size, n = Pack<E>::n;
  for (int64_t j = 0; j < width; j += size, units += n)
    for (int64_t i = 0; i < size && j + i < width; ++i) to[j + i] = units[i % n].c[i / n];
}

template <class E>
void get_state(Unit* units, const float* from, int64_t width) {
  constexpr int64_t size = Pack<E>::size, n = Pack<E>::n;
  for (int64_t j = 0; j < width; j += size, units += n)
    for (int64_t i = 0; i < size && j + i < width; ++i) units[i % n].c[i / n] = from[j + i];
}

template <class E>
void zero(E* p, int64_t n) {
  for (int64_t j = 0; j < n; ++j) p[j] = E{};
}

template <class E, bool Tanh, Highway H, bool Masked, bool Stream>
struct Forward {
  template <bool Tail>
  static ALWAYS_INLINE void block(const E* u, const E* x, E* h, int64_t u_k, int64_t u_ahead, int64_t x_ahead,
                                  Unit* units, Vec scale, int count = 0) {
    const Pack<E> u0 = get<Tail>(u, count), u1 = get<Tail>(u + u_k, count), u2 = get<Tail>(u + 2 * u_k, count);
    Pack<E> xs{}, out;
    if constexpr (H != Highway::none) xs = get<Tail>(H == Highway::x ? x : u + 3 * u_k, count);
    prefetch(u + u_ahead);
    prefetch(u + u_ahead + u_k);
    prefetch(u + u_ahead + 2 * u_k);
    if constexpr (H == Highway::x) prefetch(x + x_ahead);
    if constexpr (H == Highway::u3) prefetch(u + u_ahead + 3 * u_k);
    for (int q = 0; q < Pack<E>::n; ++q) {
      Unit& k = units[q];
      const Vec c0 = load(k.c);
      const Vec f = gate(u1.v[q], c0, k.wf, k.bf), r = gate(u2.v[q], c0, k.wr, k.br);
      const Vec c1 = fma(f, c0 - u0.v[q], u0.v[q]);
      store(k.c, c1);
      const Vec g = Tanh ? tanh_of(c1) : c1;
      const Vec rm = r * load(k.m);
      if constexpr (H == Highway::none) {
        out.v[q] = rm * g;
      } else {
        const Vec carried = scale * xs.v[q];
        out.v[q] = fma(rm, g - carried, carried);
      }
    }
    put<Tail, Stream>(h, out, count);
  }

  static void run(const Problem& p, int64_t b, int64_t j0, int64_t j1) {
    constexpr int64_t size = Pack<E>::size, n = Pack<E>::n;
    const int64_t width = j1 - j0, whole = width / size, vectors = (width + size - 1) / size * n;
    const int tail = static_cast<int>(width % size);
    const int64_t u_k = p.u_k, u_next = p.reverse ? -p.u_t : p.u_t, x_next = p.reverse ? -p.x_t : p.x_t;
    const int64_t near = whole < kAhead ? 0 : whole - kAhead, back = -near * size, rows = undertow::saved_rows(p.T);
    const Vec scale = Vec::set(p.scale);
    Unit units[kMaxWidth / Vec::lanes];
    fill<E>(units, p, b, j0, width);

    for (int64_t s = 0; s < p.T; ++s) {
      const At<E> at(p, b, s, j0, Masked);
      E* h = static_cast<E*>(p.h) + (b * p.T + at.t) * p.d + j0;
      if (p.saved && s % kChunk == 0) put_state<E>(units, p.saved + (b * rows + s / kChunk) * p.d + j0, width);
      if (Masked && at.padded) {
        zero(h, width);
        continue;
      }
      if (Masked && at.reset && !p.reverse) clear(units, vectors, &Unit::c);
      int64_t v = 0, j = 0;
      for (; v < near; ++v, j += size)
        block<false>(at.u + j, at.x + j, h + j, u_k, kAhead * size, kAhead * size, units + v * n, scale);
      for (; v < whole; ++v, j += size)
        block<false>(at.u + j, at.x + j, h + j, u_k, u_next + back, x_next + back, units + v * n, scale);
      if (tail) block<true>(at.u + j, at.x + j, h + j, u_k, u_next, x_next, units + v * n, scale, tail);
      // A document starts at t: read backwards, it ends here, and the one before it must not see its state.
      if (Masked && at.reset && p.reverse) clear(units, vectors, &Unit::c);
    }
    put_state<E>(units, p.c + b * p.d + j0, width);
    if (p.saved) {
      if (p.T % kChunk == 0) put_state<E>(units, p.saved + (b * rows + p.T / kChunk) * p.d + j0, width);
      put_state<E>(units, p.saved + (b * rows + rows - 1) * p.d + j0, width);
    }
    if (Stream) stream_fence();
  }
};

template <class E, bool Tanh, Highway H, bool Masked, bool Stream>
struct Backward {
  template <bool Tail>
  static ALWAYS_INLINE void forth(const E* u, const E* x, const E* gh, int64_t u_k, int64_t u_ahead, Unit* units,
                                  Step* steps, int count = 0) {
    const Pack<E> u0 = get<Tail>(u, count), u1 = get<Tail>(u + u_k, count), u2 = get<Tail>(u + 2 * u_k, count);
    prefetch(u + u_ahead);
    prefetch(u + u_ahead + u_k);
    prefetch(u + u_ahead + 2 * u_k);
    // The way back writes more than it reads: what it needs is fetched here already, where there is time.
    prefetch_far(gh);
    if constexpr (H == Highway::x) prefetch_far(x);
    if constexpr (H == Highway::u3) prefetch_far(u + 3 * u_k);
    for (int q = 0; q < Pack<E>::n; ++q) {
      Unit& k = units[q];
      const Vec c0 = load(k.c);
      const Vec f = gate(u1.v[q], c0, k.wf, k.bf), r = gate(u2.v[q], c0, k.wr, k.br);
      store(steps[q].c, c0);
      store(steps[q].f, f);
      store(steps[q].r, r);
      store(k.c, fma(f, c0 - u0.v[q], u0.v[q]));
    }
  }

  // With dh = dL/dh and dc = dL/dc' from later steps:
  //   dc += dh m r g'(c')
  //   du0 = dc (1 - f)         da_f = dc (c - u0) f (1 - f)      da_r = dh m (g - x') r (1 - r)
  //   dx' = dh (1 - m r)       dc_before = dc f + da_f v_f + da_r v_r
  template <bool Tail>
  static ALWAYS_INLINE void back(const E* u, const E* x, const E* gh, E* gu, E* gx, int64_t u_k, int64_t gu_k,
                                 const Step* steps, const Unit* units, GradUnit* grads, Vec scale, int count = 0) {
    const Vec one = Vec::set(1.0f);
    const Pack<E> u0 = get<Tail>(u, count), dh = get<Tail>(gh, count);
    Pack<E> xs{}, du0, du1, du2, dx;
    if constexpr (H != Highway::none) xs = get<Tail>(H == Highway::x ? x : u + 3 * u_k, count);
    for (int q = 0; q < Pack<E>::n; ++q) {
      const Unit& k = units[q];
      GradUnit& grad = grads[q];
      const Vec c0 = load(steps[q].c), f = load(steps[q].f), r = load(steps[q].r);
      const Vec e = c0 - u0.v[q];
      const Vec c1 = fma(f, e, u0.v[q]);
      const Vec g = Tanh ? tanh_of(c1) : c1;
      const Vec dhr = dh.v[q] * (r * load(k.m));
      const Vec diff = H == Highway::none ? g : g - scale * xs.v[q];
      if constexpr (H != Highway::none) dx.v[q] = scale * (dh.v[q] - dhr);
      const Vec dc = load(grad.dc) + (Tanh ? dhr * (one - g * g) : dhr);
      const Vec d0 = dc * (one - f);
      const Vec d1 = d0 * (e * f);
      const Vec d2 = (dhr * diff) * (one - r);
      du0.v[q] = d0, du1.v[q] = d1, du2.v[q] = d2;
      const Vec through_gates = fma(d1, load(k.wf), d2 * load(k.wr));  // times the weights' scale
      store(grad.dc, fma(through_gates, Vec::set(1 / kMinusLog2e), dc * f));
      store(grad.chunk[0], fma(d1, c0, load(grad.chunk[0])));
      store(grad.chunk[1], fma(d2, c0, load(grad.chunk[1])));
      store(grad.chunk[2], d1 + load(grad.chunk[2]));
      store(grad.chunk[3], d2 + load(grad.chunk[3]));
    }
    put<Tail, Stream>(gu, du0, count);
    put<Tail, Stream>(gu + gu_k, du1, count);
    put<Tail, Stream>(gu + 2 * gu_k, du2, count);
    if constexpr (H != Highway::none) put<Tail, Stream>(H == Highway::x ? gx : gu + 3 * gu_k, dx, count);
  }

  // A row of some chunk forth and a row of the chunk after it back, vector by vector: going forth mostly computes and
  // reads, going back mostly writes, so that side by side they fill the processor and the memory better.
  struct Row {
    const E *u, *x, *gh;
    E *gu, *gx;
    Step* steps;
    int64_t u_next;  // from this row of u to the one that is read next
  };

  template <bool Forth, bool Back>
  static ALWAYS_INLINE void rows(const Row& f, const Row& r, int64_t u_k, int64_t gu_k, Unit* units, GradUnit* grads,
                                 int64_t width, Vec scale) {
    constexpr int64_t size = Pack<E>::size, n = Pack<E>::n;
    const int64_t whole = width / size, near = whole < kAhead ? 0 : whole - kAhead;
    const int tail = static_cast<int>(width % size);
    int64_t v = 0, j = 0;
    const auto both = [&](int64_t ahead) {
      if constexpr (Forth) forth<false>(f.u + j, f.x + j, f.gh + j, u_k, ahead, units + v * n, f.steps + v * n);
      if constexpr (Back)
        back<false>(r.u + j, r.x + j, r.gh + j, r.gu + j, r.gx + j, u_k, gu_k, r.steps + v * n, units + v * n, grads + v * n, scale);
    };
    for (; v < near; ++v, j += size) both(kAhead * size);
    for (; v < whole; ++v, j += size) both(f.u_next - near * size);
    if (tail) {
      if constexpr (Forth)
        forth<true>(f.u + j, f.x + j, f.gh + j, u_k, f.u_next, units + v * n, f.steps + v * n, tail);
      if constexpr (Back)
        back<true>(r.u + j, r.x + j, r.gh + j, r.gu + j, r.gx + j, u_k, gu_k, r.steps + v * n, units + v * n, grads + v * n, scale,
                   tail);
    }
  }

  static void run(const Problem& p, int64_t b, int64_t j0, int64_t j1, float* scratch) {
    constexpr int64_t size = Pack<E>::size, n = Pack<E>::n;
    const int64_t width = j1 - j0, vectors = (width + size - 1) / size * n;
    const int64_t chunks = (p.T + kChunk - 1) / kChunk, saved_rows = undertow::saved_rows(p.T);
    const int64_t parts = H == Highway::u3 ? 4 : 3, u_next = p.reverse ? -p.u_t : p.u_t;
    const Vec scale = Vec::set(p.scale);
    Step* const steps = reinterpret_cast<Step*>(scratch);
    Unit units[kMaxWidth / Vec::lanes];
    GradUnit grads[kMaxWidth / Vec::lanes];
    fill<E>(units, p, b, j0, width);
    GradTotal totals[kMaxWidth / Vec::lanes];
    for (int64_t v = 0; v < vectors; ++v) {
      store(grads[v].dc, Vec::set(0.0f));
      for (int q = 0; q < 4; ++q) store(grads[v].chunk[q], Vec::set(0.0f));
      for (int q = 0; q < 4; ++q) store(totals[v].sums[q], Vec::set(0.0f));
    }
    if (p.grad_c)
      for (int64_t j = 0; j < width; ++j) slot<E>(grads, &GradUnit::dc, j) = plain(p.grad_c[b * p.d + j0 + j]);

    // Chunks from the last to the first; while one goes back, the one before it goes forth.
    for (int64_t i = chunks; i >= 0; --i) {
      const int64_t to_forth = i - 1, to_back = i;
      if (to_forth >= 0) {
        const float* start = p.saved + (b * saved_rows + to_forth) * p.d + j0;
        get_state<E>(units, start, width);
      }
      const int64_t forth_end = (to_forth + 1) * kChunk < p.T ? (to_forth + 1) * kChunk : p.T;
      const int64_t back_end = (to_back + 1) * kChunk < p.T ? (to_back + 1) * kChunk : p.T;

      for (int64_t l = 0; l < kChunk; ++l) {
        const int64_t fs = to_forth * kChunk + l, bs = back_end - 1 - l;
        bool go_forth = to_forth >= 0 && fs < forth_end, go_back = to_back < chunks && bs >= to_back * kChunk;
        bool forth_reset = false, back_reset = false;
        Row f{}, r{};
        if (go_forth) {
          const At<E> at(p, b, fs, j0, Masked);
          // After the chunk's last step comes the first of the chunk before.
          const int64_t next = fs + 1 < forth_end ? u_next : (1 - 2 * kChunk) * u_next;
          f = {at.u, at.x, at.gh, nullptr, nullptr, steps + (to_forth % 2 * kChunk + l) * vectors, next};
          go_forth = !(Masked && at.padded);
          forth_reset = Masked && at.reset;
        }
        if (go_back) {
          const At<E> at(p, b, bs, j0, Masked);
          E* gu = static_cast<E*>(p.grad_u) + (b * p.T + at.t) * parts * p.d + j0;
          E* gx = static_cast<E*>(p.grad_x) + (b * p.T + at.t) * p.d + j0;
          r = {at.u, at.x, at.gh, gu, gx, steps + bs % (2 * kChunk) * vectors, 0};
          if (Masked && at.padded) {
            for (int64_t q = 0; q < parts; ++q) zero(gu + q * p.d, width);
            if (H == Highway::x) zero(gx, width);
            go_back = false;
          }
          back_reset = Masked && at.reset;
        }
        if (Masked && forth_reset && !p.reverse) clear(units, vectors, &Unit::c);
        if (Masked && back_reset && p.reverse) clear(grads, vectors, &GradUnit::dc);
        if (go_forth && go_back) rows<true, true>(f, r, p.u_k, p.d, units, grads, width, scale);
        else if (go_forth) rows<true, false>(f, r, p.u_k, p.d, units, grads, width, scale);
        else if (go_back) rows<false, true>(f, r, p.u_k, p.d, units, grads, width, scale);
        if (Masked && forth_reset && p.reverse) clear(units, vectors, &Unit::c);
        if (Masked && back_reset && !p.reverse) clear(grads, vectors, &GradUnit::dc);
      }

      for (int64_t v = 0; v < vectors; ++v)
        for (int q = 0; q < 4; ++q) {
          store(totals[v].sums[q], load(totals[v].sums[q]) + load(grads[v].chunk[q]));
          store(grads[v].chunk[q], Vec::set(0.0f));
        }
    }

    for (int64_t j = 0; j < width; ++j) {
      p.grad_c0[b * p.d + j0 + j] = slot<E>(grads, &GradUnit::dc, j);
      const int64_t in_block = j % size;
      const GradTotal& total = totals[j / size * n + in_block % n];
      for (int q = 0; q < 4; ++q) p.grad_params[(b * 4 + q) * p.d + j0 + j] = total.sums[q][in_block / n];
    }
    if (Stream) stream_fence();
  }
};

// From the options of a call to the instance that has them compiled in.
template <template <class, bool, Highway, bool, bool> class Pass, class E, bool Tanh, Highway H, class... Scratch>
void pick_memory(const Problem& p, int64_t b, int64_t j0, int64_t j1, Scratch... scratch) {
  if (p.padding || p.resets) Pass<E, Tanh, H, true, false>::run(p, b, j0, j1, scratch...);
  else if (p.stream) Pass<E, Tanh, H, false, true>::run(p, b, j0, j1, scratch...);
  else Pass<E, Tanh, H, false, false>::run(p, b, j0, j1, scratch...);
}

template <template <class, bool, Highway, bool, bool> class Pass, class E, bool Tanh, class... Scratch>
void pick_highway(const Problem& p, int64_t b, int64_t j0, int64_t j1, Scratch... scratch) {
  if (p.highway == Highway::x) pick_memory<Pass, E, Tanh, Highway::x>(p, b, j0, j1, scratch...);
  else if (p.highway == Highway::u3) pick_memory<Pass, E, Tanh, Highway::u3>(p, b, j0, j1, scratch...);
  else pick_memory<Pass, E, Tanh, Highway::none>(p, b, j0, j1, scratch...);
}

template <template <class, bool, Highway, bool, bool> class Pass, class... Scratch>
void pick(const Problem& p, int64_t b, int64_t j0, int64_t j1, Scratch... scratch) {
  const bool half = p.dtype == undertow::Dtype::bfloat16;
  if (half && p.tanh) pick_highway<Pass, bf16, true>(p, b, j0, j1, scratch...);
  else if (half) pick_highway<Pass, bf16, false>(p, b, j0, j1, scratch...);
  else if (p.tanh) pick_highway<Pass, float, true>(p, b, j0, j1, scratch...);
  else pick_highway<Pass, float, false>(p, b, j0, j1, scratch...);
}

void forward(const Problem& p, int64_t b, int64_t j0, int64_t j1) { pick<Forward>(p, b, j0, j1); }
void backward(const Problem& p, int64_t b, int64_t j0, int64_t j1, float* scratch) {
  pick<Backward>(p, b, j0, j1, scratch);
}
