//! Requests for a grant that are not answered yet.
//!
//! They are served by time, then UID; what a pod is guaranteed comes before what it is not. A
//! request above a guarantee never passes an earlier one of its kind, so a large one is not
//! starved by small ones.

use std::sync::Arc;

use crate::time::Millis;

/// Most unanswered requests of one pod: as many as it can have processes with the guard.
pub const MOST_OF_A_POD: usize = 1024;

/// A guarded pod asks for bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// UID of the pod.
    pub uid: Arc<str>,
    /// By which the answer is known; unique among unanswered requests.
    pub id: u64,
    /// What the pod would have in total, in bytes: a level, so that asking twice gives it once.
    pub wanted: u64,
    /// How long it may wait for others to give up memory, in milliseconds.
    pub wait_ms: u64,
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// UID of the pod.
    pub uid: Arc<str>,
    /// Of the request.
    pub id: u64,
    /// What came of it.
    pub outcome: Outcome,
}

/// What came of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The pod may have so many bytes in total.
    Granted {
        /// At least what was asked for.
        granted: u64,
    },
    /// It may not, and the allocation fails for want of memory.
    Refused(Refusal),
}

/// Why a request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refusal {
    /// It is above the pod's limit.
    OverLimit,
    /// It is more than the pool could give if nobody else had anything.
    TooLarge,
    /// The pool has nothing left above what others are guaranteed, and the pod does not wait.
    PoolEmpty,
    /// Nothing came free while it waited.
    TimedOut,
    /// The breaker allows nothing above a guarantee.
    Frozen,
    /// The keeper did not hand over in time.
    KeeperSlow,
    /// No such pod is bound to the device.
    UnknownPod,
    /// The pod has too many unanswered requests.
    TooManyWaiting,
    /// The device was not measured yet, or the driver does not say what is needed.
    NotMeasured,
}

impl Refusal {
    /// One word for metrics and events.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::OverLimit => "OverLimit",
            Self::TooLarge => "TooLarge",
            Self::PoolEmpty => "PoolEmpty",
            Self::TimedOut => "TimedOut",
            Self::Frozen => "Frozen",
            Self::KeeperSlow => "KeeperSlow",
            Self::UnknownPod => "UnknownPod",
            Self::TooManyWaiting => "TooManyWaiting",
            Self::NotMeasured => "NotMeasured",
        }
    }
}

/// A request that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Waiting {
    pub(super) request: Request,
    pub(super) since: Millis,
    /// Since when the pod is entitled to it, and only the bytes are to come.
    pub(super) placed: Option<Millis>,
}

impl Waiting {
    /// When it is refused at last. What is owed or on its way is given `patience` in any case.
    pub(super) fn deadline(&self, owed: bool, patience: u64) -> Millis {
        let own = self.since.plus(self.request.wait_ms);
        match self.placed {
            Some(placed) => own.max(placed.plus(patience)),
            None if owed => own.max(self.since.plus(patience)),
            None => own,
        }
    }
}

/// All requests that wait, in the order in which they are served.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Queue(Vec<Waiting>);

impl Queue {
    /// Takes a request in. One with the same ID is replaced, but keeps its place in time.
    pub(super) fn push(&mut self, request: Request, now: Millis) -> Result<(), Refusal> {
        let old = self.remove(request.id).filter(|old| old.request.uid == request.uid);
        let since = old.map_or(now, |old| old.since);
        if self.0.iter().filter(|w| w.request.uid == request.uid).count() >= MOST_OF_A_POD {
            return Err(Refusal::TooManyWaiting);
        }
        let key = (since, &request.uid, request.id);
        let place = self.0.partition_point(|w| (w.since, &w.request.uid, w.request.id) <= key);
        self.0.insert(place, Waiting { request, since, placed: None });
        Ok(())
    }

    /// Takes a request out.
    pub(super) fn remove(&mut self, id: u64) -> Option<Waiting> {
        let place = self.0.iter().position(|w| w.request.id == id)?;
        Some(self.0.remove(place))
    }

    /// Takes out every request for which `answer` has one.
    pub(super) fn answer(&mut self, mut answer: impl FnMut(&Waiting) -> Option<Outcome>) -> Vec<Answer> {
        let mut answers = Vec::new();
        self.0.retain(|waiting| match answer(waiting) {
            Some(outcome) => {
                let Request { uid, id, .. } = &waiting.request;
                answers.push(Answer { uid: uid.clone(), id: *id, outcome });
                false
            }
            None => true,
        });
        answers
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Waiting> {
        self.0.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Waiting> {
        self.0.iter_mut()
    }

    pub(super) fn of<'a>(&'a self, uid: &'a str) -> impl Iterator<Item = &'a Waiting> {
        self.0.iter().filter(move |w| &*w.request.uid == uid)
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request(uid: &str, id: u64) -> Request {
        Request { uid: uid.into(), id, wanted: 1, wait_ms: 1000 }
    }

    fn ids(queue: &Queue) -> Vec<u64> {
        queue.iter().map(|w| w.request.id).collect()
    }

    #[test]
    fn they_stand_by_time_then_uid() {
        let mut queue = Queue::default();
        for (uid, id, at) in [("b", 1, 5), ("a", 2, 5), ("c", 3, 4), ("a", 4, 6)] {
            queue.push(request(uid, id), Millis(at)).unwrap();
        }
        assert_eq!(ids(&queue), [3, 2, 1, 4]);
    }

    #[test]
    fn asking_again_does_not_cost_ones_place() {
        let mut queue = Queue::default();
        queue.push(request("a", 1), Millis(0)).unwrap();
        queue.push(request("b", 2), Millis(1)).unwrap();
        queue.push(request("a", 1), Millis(2)).unwrap();
        assert_eq!(ids(&queue), [1, 2]);
    }

    #[test]
    fn a_flood_is_refused_and_harms_nobody_else() {
        let mut queue = Queue::default();
        for id in 0..2000 {
            let pushed = queue.push(request("a", id), Millis(0));
            assert_eq!(pushed.is_ok(), id < 1024);
        }
        assert_eq!(queue.push(request("b", 5000), Millis(0)), Ok(()));
        assert_eq!(queue.len(), MOST_OF_A_POD + 1);
    }

    #[test]
    fn what_is_owed_or_on_its_way_is_not_refused_at_once() {
        let mut waiting = Waiting { request: request("a", 1), since: Millis(10), placed: None };
        waiting.request.wait_ms = 0;
        assert_eq!(waiting.deadline(false, 2000), Millis(10));
        assert_eq!(waiting.deadline(true, 2000), Millis(2010));
        waiting.placed = Some(Millis(15));
        assert_eq!(waiting.deadline(false, 2000), Millis(2015));
    }

    proptest! {
        #[test]
        fn the_order_is_the_same_in_whatever_order_they_came(
            mut requests in prop::collection::vec((0u64..5, 0u8..4), 1..30),
            seed in any::<u64>(),
        ) {
            let fill = |requests: &[(usize, (u64, u8))]| {
                let mut queue = Queue::default();
                for (id, (at, uid)) in requests {
                    queue.push(request(&uid.to_string(), *id as u64), Millis(*at)).unwrap();
                }
                ids(&queue)
            };
            requests.truncate(30);
            let mut numbered: Vec<_> = requests.into_iter().enumerate().collect();
            let first = fill(&numbered);
            let by = usize::try_from(seed % numbered.len() as u64).unwrap();
            numbered.rotate_left(by);
            prop_assert_eq!(fill(&numbered), first);
        }
    }
}
