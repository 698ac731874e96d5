//! Which step comes next, by where the driver has each process: no step is remembered, so whoever
//! goes on after a death anywhere finds the way from where things are.
//!
//! All processes of a park are moved, or none. Where a step fails, the way turns: what was moved is
//! brought back. Where that fails as well, things stay where they are, and are told as they are.

/// Where a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum At {
    /// It runs.
    Running,
    /// Its calls of the driver block.
    Locked,
    /// Its memory is on the host.
    Checkpointed,
    /// The driver lost it.
    Failed,
    /// Its memory is being moved, by a step whose asker may be dead.
    Moving,
    /// It has ended.
    Gone,
}

/// What is to become of a park's processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Aim {
    /// All on the host.
    Park,
    /// All running.
    Run,
    /// As they are if all are on the host, else running: what is left of a park that was interrupted.
    Settle,
}

/// A step of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    /// Running to locked.
    Lock,
    /// Locked to checkpointed.
    Checkpoint,
    /// Checkpointed to locked.
    Restore,
    /// Locked to running.
    Unlock,
}

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// This step of the process at that place.
    Do(usize, Act),
    /// Something is under way.
    Wait,
    /// Nothing.
    Done,
    /// Nothing: a process is lost.
    Lost,
}

/// The next step. All are locked before the first is moved, since a lock fails cheaply and harms
/// nobody; all are back before the first runs.
pub(crate) fn next(aim: Aim, at: &[At]) -> Next {
    if at.contains(&At::Failed) {
        return Next::Lost;
    }
    if at.contains(&At::Moving) {
        return Next::Wait;
    }
    let find = |wanted, act| at.iter().position(|at| *at == wanted).map(|place| Next::Do(place, act));
    let found = match aim {
        Aim::Park => find(At::Running, Act::Lock).or_else(|| find(At::Locked, Act::Checkpoint)),
        Aim::Settle if !at.contains(&At::Running) && !at.contains(&At::Locked) => None,
        Aim::Run | Aim::Settle => {
            find(At::Checkpointed, Act::Restore).or_else(|| find(At::Locked, Act::Unlock))
        }
    };
    found.unwrap_or(Next::Done)
}

/// Why a step was not made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// In words.
    pub(crate) message: String,
    /// The process was somewhere else than the step begins, as while another step is under way.
    pub(crate) elsewhere: bool,
}

/// Whatever makes the steps.
pub(crate) trait Hands {
    /// Where each process is.
    fn look(&mut self) -> Result<Vec<At>, String>;
    /// Makes a step.
    fn act(&mut self, place: usize, act: Act) -> Result<(), Fault>;
    /// Waits a little for what is under way. False: it has been waited for long enough.
    fn wait(&mut self) -> bool;
}

/// Where a park's processes are at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Place {
    /// All that are left run.
    Running,
    /// At least one is on the host, or may be.
    Parked,
    /// One is lost.
    Lost,
}

/// What a way came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// Where the processes are.
    pub(crate) place: Place,
    /// What went wrong first.
    pub(crate) message: Option<String>,
}

/// Goes the whole way.
pub(crate) fn go(aim: Aim, processes: usize, hands: &mut impl Hands) -> Outcome {
    let (mut aim, mut message, mut turned) = (aim, None::<String>, false);
    // Two steps each way and back; more is a driver that says one thing and does another.
    let mut left = processes.saturating_mul(6).saturating_add(6);
    let mut touched = aim != Aim::Park;
    loop {
        let at = match hands.look() {
            Ok(at) => at,
            Err(error) => {
                // Whoever asks again finds out.
                let place = if touched { Place::Parked } else { Place::Running };
                return Outcome { place, message: message.or(Some(error)) };
            }
        };
        let fault = match next(aim, &at) {
            Next::Done => return Outcome { place: place(&at), message },
            Next::Lost => {
                let lost = || "the driver lost a process while its memory was moved".to_owned();
                return Outcome { place: Place::Lost, message: Some(message.unwrap_or_else(lost)) };
            }
            Next::Wait if hands.wait() => continue,
            Next::Wait => {
                Fault { message: "the driver does not come to an end".to_owned(), elsewhere: false }
            }
            Next::Do(..) if left == 0 => {
                let why = "the driver says that steps are done and does not do them".to_owned();
                return Outcome { place: place(&at), message: message.or(Some(why)) };
            }
            Next::Do(process, act) => match hands.act(process, act) {
                Ok(()) => {
                    (left, touched) = (left - 1, true);
                    continue;
                }
                Err(fault) if fault.elsewhere && hands.wait() => continue,
                Err(fault) => fault,
            },
        };
        message.get_or_insert(fault.message);
        // What failed may have moved it all the same, or lost it.
        let at = hands.look().unwrap_or(at);
        // Some may run already, and are not stopped again for the sake of the others.
        if turned || (aim != Aim::Park && at.contains(&At::Running)) {
            return Outcome { place: place(&at), message };
        }
        turned = true;
        aim = if aim == Aim::Park { Aim::Run } else { Aim::Park };
    }
}

/// Where processes are, together.
fn place(at: &[At]) -> Place {
    if at.contains(&At::Failed) {
        Place::Lost
    } else if at.iter().any(|at| matches!(at, At::Checkpointed | At::Locked | At::Moving)) {
        Place::Parked
    } else {
        Place::Running
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A driver in which steps fail, or whose asker dies, where it is told to.
    #[derive(Clone, Debug)]
    struct Driver {
        at: Vec<At>,
        /// For each step made, from the first: what becomes of it.
        fates: Vec<Fate>,
        made: usize,
        /// The asker is dead: nothing more is asked.
        dead: bool,
        patience: u32,
        acts: Vec<(usize, Act)>,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Fate {
        Well,
        Refused,
        /// The process is lost by it.
        Loses,
        /// The asker dies before the step, or after it.
        DiesBefore,
        DiesAfter,
    }

    impl Hands for Driver {
        fn look(&mut self) -> Result<Vec<At>, String> {
            if self.dead { Err("dead".to_owned()) } else { Ok(self.at.clone()) }
        }

        fn act(&mut self, place: usize, act: Act) -> Result<(), Fault> {
            self.acts.push((place, act));
            let fate = self.fates.get(self.made).copied().unwrap_or(Fate::Well);
            self.made += 1;
            let fault = |elsewhere| Err(Fault { message: format!("{act:?} refused"), elsewhere });
            let (from, to) = match act {
                Act::Lock => (At::Running, At::Locked),
                Act::Checkpoint => (At::Locked, At::Checkpointed),
                Act::Restore => (At::Checkpointed, At::Locked),
                Act::Unlock => (At::Locked, At::Running),
            };
            let at = &mut self.at[place];
            if *at != from {
                return fault(true);
            }
            match fate {
                Fate::Well => *at = to,
                Fate::Refused => return fault(false),
                Fate::Loses => {
                    *at = At::Failed;
                    return fault(false);
                }
                Fate::DiesBefore => {
                    self.dead = true;
                    return fault(false);
                }
                Fate::DiesAfter => {
                    *at = to;
                    self.dead = true;
                }
            }
            Ok(())
        }

        fn wait(&mut self) -> bool {
            self.patience = self.patience.saturating_sub(1);
            self.patience > 0
        }
    }

    fn driver(processes: usize, fates: &[Fate]) -> Driver {
        let at = vec![At::Running; processes];
        Driver { at, fates: fates.to_vec(), made: 0, dead: false, patience: 10, acts: Vec::new() }
    }

    #[test]
    fn all_are_locked_before_one_is_moved_and_back_before_one_runs() {
        use Act::{Checkpoint, Lock, Restore, Unlock};
        let mut driver = driver(2, &[]);
        assert_eq!(go(Aim::Park, 2, &mut driver), Outcome { place: Place::Parked, message: None });
        assert_eq!(go(Aim::Run, 2, &mut driver), Outcome { place: Place::Running, message: None });
        let expected = [
            (0, Lock),
            (1, Lock),
            (0, Checkpoint),
            (1, Checkpoint),
            (0, Restore),
            (1, Restore),
            (0, Unlock),
            (1, Unlock),
        ];
        assert_eq!(driver.acts, expected);
        // Again: nothing.
        assert_eq!(go(Aim::Run, 2, &mut driver).place, Place::Running);
        assert_eq!(driver.acts.len(), expected.len());
    }

    #[test]
    fn what_was_moved_is_brought_back_when_the_next_is_refused() {
        let mut driver = driver(2, &[Fate::Well, Fate::Well, Fate::Well, Fate::Refused]);
        let outcome = go(Aim::Park, 2, &mut driver);
        assert_eq!(outcome.place, Place::Running);
        assert_eq!(outcome.message.as_deref(), Some("Checkpoint refused"));
        assert_eq!(driver.at, [At::Running; 2]);
    }

    #[test]
    fn a_restore_that_is_refused_leaves_all_on_the_host() {
        let mut driver = driver(2, &[Fate::Well, Fate::Refused]);
        driver.at = vec![At::Checkpointed; 2];
        let outcome = go(Aim::Run, 2, &mut driver);
        assert_eq!((outcome.place, outcome.message.is_some()), (Place::Parked, true));
        assert_eq!(driver.at, [At::Checkpointed; 2]);
    }

    #[test]
    fn a_driver_that_only_says_so_is_found_out() {
        struct Liar;
        impl Hands for Liar {
            fn look(&mut self) -> Result<Vec<At>, String> {
                Ok(vec![At::Running])
            }
            fn act(&mut self, _: usize, _: Act) -> Result<(), Fault> {
                Ok(())
            }
            fn wait(&mut self) -> bool {
                true
            }
        }
        assert!(go(Aim::Park, 1, &mut Liar).message.unwrap().contains("does not do them"));
    }

    fn fates() -> impl Strategy<Value = Vec<Fate>> {
        let fate = prop_oneof![
            6 => Just(Fate::Well),
            2 => Just(Fate::Refused),
            1 => Just(Fate::Loses),
            2 => Just(Fate::DiesBefore),
            2 => Just(Fate::DiesAfter),
        ];
        prop::collection::vec(fate, 0..16)
    }

    proptest! {
        /// Whoever dies, and however often: whoever comes next, and is left in peace, brings
        /// everything back, or says that a process is lost.
        #[test]
        fn nothing_stays_parked_whoever_is_killed_and_when(
            processes in 1_usize..4,
            park in any::<bool>(),
            lives in prop::collection::vec(fates(), 1..5),
            gone in prop::collection::vec(any::<bool>(), 3),
        ) {
            let mut driver = driver(processes, &[]);
            let mut aim = if park { Aim::Park } else { Aim::Run };
            for fates in lives {
                (driver.fates, driver.made, driver.dead, driver.patience) = (fates, 0, false, 10);
                let outcome = go(aim, processes, &mut driver);
                prop_assert!(driver.acts.len() < 1000);
                if !driver.dead {
                    let held = |at: &At| !matches!(at, At::Running | At::Gone);
                    let lost = driver.at.contains(&At::Failed);
                    prop_assert_eq!(outcome.place == Place::Lost, lost);
                    prop_assert!(outcome.place != Place::Running || !driver.at.iter().any(held));
                    prop_assert!(lost || outcome.place == Place::Running || driver.at.iter().any(held));
                }
                aim = Aim::Settle;
            }
            for (at, gone) in driver.at.iter_mut().zip(gone) {
                if gone {
                    *at = At::Gone;
                }
            }
            (driver.fates, driver.dead, driver.patience) = (Vec::new(), false, 10);
            let outcome = go(Aim::Run, processes, &mut driver);
            if driver.at.contains(&At::Failed) {
                prop_assert_eq!(outcome.place, Place::Lost);
            } else {
                prop_assert_eq!(outcome.place, Place::Running);
                prop_assert!(driver.at.iter().all(|at| matches!(at, At::Running | At::Gone)));
            }
        }

        /// A park that is interrupted is whole afterwards: all on the host, or all running.
        #[test]
        fn a_park_that_was_interrupted_is_whole_or_undone(
            processes in 1_usize..4,
            fates in prop::collection::vec(prop_oneof![Just(Fate::Well), Just(Fate::DiesBefore), Just(Fate::DiesAfter)], 0..8),
        ) {
            let mut driver = driver(processes, &fates);
            go(Aim::Park, processes, &mut driver);
            (driver.fates, driver.dead, driver.patience) = (Vec::new(), false, 10);
            let outcome = go(Aim::Settle, processes, &mut driver);
            let all = |wanted| driver.at.iter().all(|at| *at == wanted);
            prop_assert!(all(At::Checkpointed) && outcome.place == Place::Parked
                || all(At::Running) && outcome.place == Place::Running);
        }
    }
}
