//! The end of a keeper that was told to end: a keeper that stands by takes over, or what is parked comes
//! back. Both share one deadline, since the kubelet kills what is left after the pod's grace period.

use std::time::Duration;

use tokio::time::Instant;

/// How long a keeper that stands by may take to begin to take over. Before anything else, since a
/// hand-over leaves everything as it is.
const ANSWER: Duration = Duration::from_secs(8);
/// What comes back in a second, in bytes: half of what was measured (docs/park.md).
const RATE: u64 = 2 << 30;
/// What each park takes beyond that, until a worker has the driver.
const EACH: Duration = Duration::from_secs(2);

/// How far an end is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ending {
    began: Instant,
    /// It is over then, whatever is left.
    until: Instant,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// A keeper that stands by was asked to take over, or could not do so until then.
    Offered { asked: Instant },
    /// What is parked is brought back.
    Undoing,
}

/// What is parked and can be brought back from here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Owed {
    /// How many parks.
    pub(crate) parks: u32,
    /// What they have in all.
    pub(crate) bytes: u64,
}

/// What an end goes by.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    /// A keeper stands by.
    pub(super) successor: bool,
    /// It is being handed everything.
    pub(super) taking_over: bool,
    /// Memory is being moved: nobody is handed anything until that is done.
    pub(super) moving: bool,
    /// What is parked.
    pub(super) owed: Owed,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Something goes on.
    Wait,
    /// Begin to bring back what is parked: this one will not be relieved.
    Undo,
    /// End.
    Leave,
}

impl Ending {
    /// An end that may last so long.
    pub(super) fn new(lasts: Duration, now: Instant) -> Self {
        Self { began: now, until: now + lasts, stage: Stage::Offered { asked: now } }
    }

    /// The next step.
    pub(super) fn next(&mut self, seen: &Seen, now: Instant) -> Next {
        if self.until <= now {
            return Next::Leave;
        }
        match self.stage {
            Stage::Undoing if seen.owed.parks == 0 => Next::Leave,
            Stage::Undoing => Next::Wait,
            // Whoever was to take over may have died before it was asked, or since.
            Stage::Offered { .. } if !seen.successor && !seen.taking_over => self.undo(seen),
            Stage::Offered { asked } => {
                let patience = if seen.moving || seen.taking_over {
                    self.stage = Stage::Offered { asked: now };
                    self.until
                } else {
                    asked + ANSWER
                };
                // Whoever has begun to take over may have taken all up by now: cutting that off would leave
                // two keepers to bring the same memory back. It does not go on for ever.
                let patience = if seen.taking_over { patience } else { patience.min(self.latest(seen.owed)) };
                if now < patience { Next::Wait } else { self.undo(seen) }
            }
        }
    }

    fn undo(&mut self, seen: &Seen) -> Next {
        self.stage = Stage::Undoing;
        if seen.owed.parks == 0 { Next::Leave } else { Next::Undo }
    }

    /// When bringing back has to begin to be done in time. Where it takes longer than there is, a
    /// hand-over has its chance all the same: it is the only thing that can come to its end.
    fn latest(&self, owed: Owed) -> Instant {
        let first = self.began + ANSWER;
        self.until.checked_sub(takes(owed)).map_or(first, |latest| latest.max(first))
    }
}

/// How long it takes to bring so much back, one after the other.
fn takes(owed: Owed) -> Duration {
    EACH.saturating_mul(owed.parks).saturating_add(Duration::from_secs(owed.bytes.div_ceil(RATE)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GIB: u64 = 1 << 30;
    const LASTS: Duration = Duration::from_secs(110);

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn owed(parks: u32, gib: u64) -> Owed {
        Owed { parks, bytes: gib * GIB }
    }

    #[test]
    fn with_nothing_parked_and_nobody_there_it_ends_at_once() {
        let now = Instant::now();
        assert_eq!(Ending::new(LASTS, now).next(&Seen::default(), now), Next::Leave);
    }

    #[test]
    fn what_is_parked_comes_back_where_nobody_stands_by() {
        let now = Instant::now();
        let mut ending = Ending::new(LASTS, now);
        let seen = Seen { owed: owed(1, 20), ..Seen::default() };
        assert_eq!(ending.next(&seen, now), Next::Undo);
        assert_eq!(ending.next(&seen, now + seconds(50)), Next::Wait);
        assert_eq!(ending.next(&Seen::default(), now + seconds(51)), Next::Leave);
    }

    #[test]
    fn one_that_does_not_answer_is_waited_for_a_moment_from_when_it_can() {
        let now = Instant::now();
        let mut ending = Ending::new(LASTS, now);
        let silent = Seen { successor: true, owed: owed(1, 20), ..Seen::default() };
        assert_eq!(ending.next(&silent, now + ANSWER / 2), Next::Wait);
        // A pod's memory is being moved: the keeper that stands by can do nothing about that.
        let moving = Seen { moving: true, ..silent };
        assert_eq!(ending.next(&moving, now + ANSWER * 3), Next::Wait);
        assert_eq!(ending.next(&silent, now + ANSWER * 3 + ANSWER / 2), Next::Wait);
        assert_eq!(ending.next(&silent, now + ANSWER * 4), Next::Undo);
    }

    #[test]
    fn the_more_is_parked_the_sooner_it_begins_to_come_back() {
        let now = Instant::now();
        let begins = |owed| {
            let mut ending = Ending::new(LASTS, now);
            let moving = Seen { successor: true, moving: true, owed, ..Seen::default() };
            (0..110).find(|at| ending.next(&moving, now + seconds(*at)) != Next::Wait)
        };
        // 2 s a park and 2 GiB a second of 110 s, but never before somebody had a chance to take over.
        assert_eq!(begins(owed(1, 20)), Some(110 - 12));
        assert_eq!(begins(owed(4, 120)), Some(110 - 68));
        assert_eq!(begins(owed(8, 1000)), Some(ANSWER.as_secs()));
        assert_eq!(begins(owed(u32::MAX, u64::MAX / GIB)), Some(ANSWER.as_secs()));
        assert_eq!(begins(Owed::default()), None, "nothing has to come back");
    }

    #[test]
    fn a_hand_over_that_goes_on_is_not_cut_off_and_one_that_failed_is_not_waited_for() {
        let now = Instant::now();
        let going_on = Seen { successor: true, taking_over: true, owed: owed(8, 1000), ..Seen::default() };
        let mut ending = Ending::new(LASTS, now);
        assert_eq!(ending.next(&going_on, now + seconds(109)), Next::Wait);
        assert_eq!(ending.next(&going_on, now + seconds(110)), Next::Leave);
        let failed = Seen { taking_over: false, owed: owed(1, 20), ..going_on };
        let mut ending = Ending::new(LASTS, now);
        assert_eq!(ending.next(&going_on, now + seconds(97)), Next::Wait);
        assert_eq!(ending.next(&failed, now + seconds(98)), Next::Undo);
    }

    fn seen() -> impl Strategy<Value = Seen> {
        let flags = (any::<bool>(), any::<bool>(), any::<bool>());
        (flags, prop_oneof![Just(0_u32), 0..40_u32], any::<u64>()).prop_map(
            |((successor, taking_over, moving), parks, bytes)| {
                let owed = Owed { parks, bytes: if parks == 0 { 0 } else { bytes } };
                Seen { successor, taking_over, moving, owed }
            },
        )
    }

    proptest! {
        /// Whatever happens in whatever order: it is over at its deadline, bringing back begins at
        /// most once, and nothing is left parked before its time.
        #[test]
        fn it_is_over_in_time(lasts in 1..200_u64, story in prop::collection::vec(seen(), 200)) {
            let now = Instant::now();
            let mut ending = Ending::new(seconds(lasts), now);
            let mut undone = 0;
            for (second, seen) in story.iter().enumerate() {
                let at = u64::try_from(second).unwrap();
                match ending.next(seen, now + seconds(at)) {
                    Next::Wait => prop_assert!(at < lasts),
                    Next::Undo => {
                        undone += 1;
                        prop_assert!(at < lasts && undone == 1);
                    }
                    Next::Leave => {
                        prop_assert!(at >= lasts || seen.owed.parks == 0);
                        return Ok(());
                    }
                }
            }
            prop_assert!(false, "it goes on for ever");
        }
    }
}
