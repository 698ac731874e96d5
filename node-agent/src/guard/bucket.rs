//! How much a peer may ask for: a bucket that fills steadily and is drawn from.

use std::time::{Duration, Instant};

/// A bucket of tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bucket {
    most: u32,
    /// Time in which one token comes in.
    each: Duration,
    tokens: u32,
    /// Up to when the tokens that came in are counted.
    counted: Instant,
}

impl Bucket {
    /// A full one that holds `most` and gets `per_second` more.
    pub(crate) fn new(most: u32, per_second: u32, now: Instant) -> Self {
        Self {
            most,
            each: (Duration::from_secs(1) / per_second.max(1)).max(Duration::from_nanos(1)),
            tokens: most,
            counted: now,
        }
    }

    /// Whether there is a token.
    pub(crate) fn has(&mut self, now: Instant) -> bool {
        self.fill(now);
        self.tokens > 0
    }

    /// Takes a token, if there is one.
    pub(crate) fn take(&mut self, now: Instant) -> bool {
        let there = self.has(now);
        self.tokens = self.tokens.saturating_sub(1);
        there
    }

    /// When there will be a token.
    pub(crate) fn ready_at(&self) -> Instant {
        if self.tokens > 0 { self.counted } else { self.counted + self.each }
    }

    fn fill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.counted);
        let came = passed.as_nanos() / self.each.as_nanos();
        let came = u32::try_from(came).unwrap_or(u32::MAX);
        self.tokens = self.tokens.saturating_add(came).min(self.most);
        self.counted =
            if self.tokens == self.most { now } else { self.counted + self.each.saturating_mul(came) };
    }
}

/// How long something that failed is left alone: longer each time that it fails again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rest {
    least: Duration,
    most: Duration,
    until: Option<Instant>,
    length: Duration,
}

impl Rest {
    /// Pauses from `least` to `most`.
    pub(crate) fn new(least: Duration, most: Duration) -> Self {
        Self { least, most, until: None, length: Duration::ZERO }
    }

    /// Until when it is left alone, if it is.
    pub(crate) fn until(&self, now: Instant) -> Option<Instant> {
        self.until.filter(|until| *until > now)
    }

    /// It failed; says when to try again.
    pub(crate) fn begin(&mut self, now: Instant) -> Instant {
        self.length = (self.length * 2).clamp(self.least, self.most);
        let until = now + self.length;
        self.until = Some(until);
        until
    }

    /// It did not fail.
    pub(crate) fn end(&mut self) {
        self.length = Duration::ZERO;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_let_through_and_then_a_steady_rate() {
        let start = Instant::now();
        let mut bucket = Bucket::new(3, 10, start);
        let taken = |bucket: &mut Bucket, milliseconds| {
            let now = start + Duration::from_millis(milliseconds);
            (0..9).filter(|_| bucket.take(now)).count()
        };
        assert_eq!(taken(&mut bucket, 0), 3);
        assert_eq!(bucket.ready_at(), start + Duration::from_millis(100));
        assert_eq!(taken(&mut bucket, 99), 0);
        assert_eq!(taken(&mut bucket, 250), 2);
        assert_eq!(bucket.ready_at(), start + Duration::from_millis(300));
        assert_eq!(taken(&mut bucket, 100_000), 3, "it does not run over");
    }

    #[test]
    fn what_fails_again_and_again_is_tried_seldom() {
        let start = Instant::now();
        let mut rest = Rest::new(Duration::from_millis(50), Duration::from_millis(300));
        assert_eq!(rest.until(start), None);
        let lengths: Vec<_> = (0..4).map(|_| (rest.begin(start) - start).as_millis()).collect();
        assert_eq!(lengths, [50, 100, 200, 300]);
        let until = start + Duration::from_millis(300);
        assert_eq!(rest.until(start), Some(until));
        assert_eq!(rest.until(until), None);
        rest.end();
        assert_eq!(rest.begin(until), until + Duration::from_millis(50));
    }

    #[test]
    fn a_clock_that_stands_still_gives_nothing() {
        let start = Instant::now();
        let mut bucket = Bucket::new(1, u32::MAX, start);
        assert!(bucket.take(start));
        assert!(!bucket.take(start));
    }
}
