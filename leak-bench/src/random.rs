//! Random numbers that are the same on every machine and with every version of every library.

use sha2::{Digest, Sha256};

/// A stream of random numbers that a name begins. SplitMix64 (Steele, Lea and Flood, 2014): each
/// state gives one output, so the stream is fixed by the name alone.
#[derive(Clone, Debug)]
pub(crate) struct Random {
    state: u64,
    /// The second number of the last pair of normal numbers.
    spare: Option<f64>,
}

impl Random {
    /// The stream of a name. Streams of different names have nothing to do with each other.
    pub(crate) fn of(name: &str) -> Self {
        let digest = Sha256::digest(name.as_bytes());
        let state = digest.iter().take(8).fold(0u64, |state, byte| state << 8 | u64::from(*byte));
        Self { state, spare: None }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Uniform in [0, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        f64::from(u32::try_from(self.next() >> 32).unwrap_or(0)) / 4_294_967_296.0
    }

    /// Uniform in [from, to).
    pub(crate) fn uniform(&mut self, from: f64, to: f64) -> f64 {
        from + (to - from) * self.unit()
    }

    /// Uniform in the logarithm, in [from, to).
    pub(crate) fn log_uniform(&mut self, from: f64, to: f64) -> f64 {
        self.uniform(from.ln(), to.ln()).exp()
    }

    /// True with a probability.
    pub(crate) fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    /// Exponential with a mean.
    pub(crate) fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }

    /// Normal with mean 0 and deviation 1 (Box and Muller, 1958).
    pub(crate) fn normal(&mut self) -> f64 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        let (sine, cosine) = (std::f64::consts::TAU * self.unit()).sin_cos();
        self.spare = Some(radius * sine);
        radius * cosine
    }

    /// One of some values.
    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        let at = crate::number::count((self.unit() * crate::number::real(from.len())).floor());
        from.get(at).or(from.last()).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_begins_the_same_stream_for_ever() {
        let mut random = Random::of("pod-1");
        assert_eq!(random.next(), Random::of("pod-1").next());
        assert_ne!(random.next(), Random::of("pod-2").next());
    }

    #[test]
    fn moments_are_as_promised() {
        let mut random = Random::of("moments");
        let n = 20_000;
        let mean = |f: &mut dyn FnMut() -> f64| (0..n).map(|_| f()).sum::<f64>() / f64::from(n);
        assert!((mean(&mut || random.unit()) - 0.5).abs() < 0.01);
        assert!((mean(&mut || random.exponential(3.0)) - 3.0).abs() < 0.1);
        assert!(mean(&mut || random.normal()).abs() < 0.03);
        assert!((mean(&mut || random.normal().powi(2)) - 1.0).abs() < 0.05);
    }
}
