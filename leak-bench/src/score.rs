//! Counts over outcomes: false acts, leaks found and missed, and how long before the end.

use crate::{
    detect::Method,
    interval::{Estimate, precision, quantile, rate, share},
    number::{real, wide},
    run::Outcome,
    series::Truth,
};

/// Benign episodes for each leak in the mix that precision is stated for.
pub(crate) const BENIGN_A_LEAK: f64 = 3.0;
/// An act this long before the end is in time, in minutes.
pub(crate) const LEAD: f64 = 10.0;
/// An act on fragmentation earlier than this before its end is wrong, in minutes: the horizon.
const HORIZON: f64 = 60.0;

/// What a detector did to series that are benign.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Benign {
    /// Lives.
    pub lives: usize,
    /// Their days.
    pub days: f64,
    /// Acts that count.
    pub acts: usize,
    /// Lives with an act.
    pub acted: usize,
    /// Suspicions that count.
    pub suspects: usize,
}

impl Benign {
    /// Acts per 1,000 days of a pod.
    pub(crate) fn per_thousand_days(&self) -> Estimate {
        rate(self.acts, self.days / 1000.0)
    }

    /// Suspicions a day of a pod.
    pub(crate) fn suspects_a_day(&self) -> f64 {
        real(self.suspects) / self.days
    }
}

/// Counts a detector's acts on benign outcomes.
pub(crate) fn benign<'a>(outcomes: impl IntoIterator<Item = &'a Outcome>, method: Method) -> Benign {
    let mut sum = Benign::default();
    for outcome in outcomes {
        let (Truth::Benign, Some(alarms)) = (outcome.truth, outcome.of(method)) else { continue };
        sum.lives += 1;
        sum.days += outcome.days;
        sum.acts += alarms.acts.len();
        sum.acted += usize::from(!alarms.acts.is_empty());
        sum.suspects += alarms.suspects.len();
    }
    sum
}

/// What a detector did to leaks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Leaks {
    /// Lives.
    pub lives: usize,
    /// Lives whose first act came after the onset and before the end.
    pub found: usize,
    /// Of these, with time to drain.
    pub in_time: usize,
    /// Lives whose first act came before the onset: false, and the leak counts as missed.
    pub early: usize,
    /// Minutes before the end of those found.
    pub leads: Vec<f64>,
}

impl Leaks {
    /// The share found in time.
    pub(crate) fn recall_in_time(&self) -> Estimate {
        share(self.in_time, self.lives)
    }

    /// The share found.
    pub(crate) fn recall(&self) -> Estimate {
        share(self.found, self.lives)
    }

    /// A quantile of the leads in minutes.
    pub(crate) fn lead(&self, part: f64) -> Option<f64> {
        quantile(&self.leads, part)
    }
}

/// The lead of an act in minutes, where there is an end.
pub(crate) fn lead(act: u64, exhausted: u64) -> f64 {
    (wide(exhausted) - wide(act)) / 60_000.0
}

/// Counts a detector's acts on leaks.
pub(crate) fn leaks<'a>(outcomes: impl IntoIterator<Item = &'a Outcome>, method: Method) -> Leaks {
    let mut sum = Leaks::default();
    for outcome in outcomes {
        let (Truth::Leak { onset, exhausted }, Some(alarms)) = (outcome.truth, outcome.of(method)) else {
            continue;
        };
        sum.lives += 1;
        match alarms.first_act() {
            Some(at) if at < onset => sum.early += 1,
            Some(at) if at < exhausted => {
                let lead = lead(at, exhausted);
                sum.found += 1;
                sum.in_time += usize::from(lead >= LEAD);
                sum.leads.push(lead);
            }
            _ => {}
        }
    }
    sum
}

/// Precision of episodes at the stated mix.
pub(crate) fn precision_of(leaks: &Leaks, benign: &Benign) -> Estimate {
    let n = leaks.lives;
    precision((leaks.found, n), (leaks.early, n), (benign.acted, benign.lives), BENIGN_A_LEAK)
}

/// The mean of the shares of leaks found and of benign lives left alone.
pub(crate) fn balanced_accuracy(leaks: &Leaks, benign: &Benign) -> f64 {
    let alone = 1.0 - real(benign.acted) / real(benign.lives);
    f64::midpoint(leaks.recall().value, alone)
}

/// What a detector did to fragmentation and to what nobody found out.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Open {
    /// Lives.
    pub lives: usize,
    /// Lives that run out.
    pub run_out: usize,
    /// Acts within the horizon before the end.
    pub near: usize,
    /// Acts before that, or where there is no end.
    pub early: usize,
}

/// Counts first acts on outcomes that are neither benign nor leaks.
pub(crate) fn open<'a>(
    outcomes: impl IntoIterator<Item = &'a Outcome>,
    method: Method,
    fragmentation: bool,
) -> Open {
    let mut sum = Open::default();
    for outcome in outcomes {
        let exhausted = match outcome.truth {
            Truth::Fragmentation { exhausted } if fragmentation => exhausted,
            Truth::Unresolved { exhausted } if !fragmentation => exhausted,
            _ => continue,
        };
        let Some(alarms) = outcome.of(method) else { continue };
        sum.lives += 1;
        sum.run_out += usize::from(exhausted.is_some());
        match (alarms.first_act(), exhausted) {
            (Some(at), Some(end)) if lead(at, end) <= HORIZON => sum.near += 1,
            (Some(_), _) => sum.early += 1,
            (None, _) => {}
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{detect::Alarms, pools::Pool};

    fn outcome(truth: Truth, acts: &[u64]) -> Outcome {
        Outcome {
            pool: Pool::Synthetic,
            pod: "pod".to_owned(),
            family: "family".to_owned(),
            truth,
            days: 2.0,
            often: true,
            alarms: vec![(Method::Highwater, Alarms { suspects: vec![1], acts: acts.to_vec() })],
            reasons: Vec::new(),
        }
    }

    #[test]
    fn an_act_before_the_onset_is_false_and_misses_the_leak() {
        let truth = Truth::Leak { onset: 600_000, exhausted: 7_200_000 };
        let outcomes: Vec<Outcome> =
            [&[500_000, 700_000][..], &[6_000_000], &[7_000_000], &[]].map(|a| outcome(truth, a)).into();
        let leaks = leaks(&outcomes, Method::Highwater);
        assert_eq!((leaks.lives, leaks.early, leaks.found, leaks.in_time), (4, 1, 2, 1));
        assert_eq!(leaks.lead(0.1), Some(200.0 / 60.0));
    }

    #[test]
    fn benign_lives_count_their_acts_and_days() {
        let outcomes: Vec<Outcome> = [&[][..], &[1, 2]].map(|a| outcome(Truth::Benign, a)).into();
        let benign = benign(&outcomes, Method::Highwater);
        assert_eq!((benign.lives, benign.acts, benign.acted, benign.suspects), (2, 2, 1, 2));
        assert!((benign.per_thousand_days().value - 500.0).abs() < 1e-9);
    }

    #[test]
    fn fragmentation_may_be_acted_on_only_near_its_end() {
        let ends = Truth::Fragmentation { exhausted: Some(7_200_000) };
        let never = Truth::Fragmentation { exhausted: None };
        let outcomes = [outcome(ends, &[5_000_000]), outcome(ends, &[1_000_000]), outcome(never, &[1])];
        let open = open(&outcomes, Method::Highwater, true);
        assert_eq!((open.lives, open.run_out, open.near, open.early), (3, 2, 1, 2));
    }
}
