#include "sampling/exponents.h"

namespace sharpwave {

Exponents Exponents::of(const format::Counters& counters) {
    return {load_real(counters.alpha), load_real(counters.beta_start), load_real(counters.beta_end),
            load_real(counters.beta_steps)};
}

void Exponents::write_to(format::Counters& counters) const {
    store_real(counters.alpha, alpha);
    store_real(counters.beta_start, beta_start);
    store_real(counters.beta_end, beta_end);
    store_real(counters.beta_steps, beta_steps);
}

}  // namespace sharpwave
