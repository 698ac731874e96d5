//! A queue of keys to be reconciled: each key at most once at a time, whatever is asked of it
//! meanwhile is one more run, and failures of a key slow down that key alone.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    fmt::Debug,
    hash::{BuildHasher, Hash, RandomState},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::Notify, task::JoinSet, time::Instant};
use tokio_util::sync::CancellationToken;

/// First wait after a failure; it doubles with each further one.
const FIRST_BACKOFF: Duration = Duration::from_millis(50);
/// Longest wait after a failure.
const LONGEST_BACKOFF: Duration = Duration::from_mins(1);

/// When a key is to be looked at again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Again {
    /// When something asks for it.
    OnChange,
    /// After this time.
    After(Duration),
    /// After a time that doubles with each failure in a row and is at least this.
    Backoff(Duration),
}

pub(crate) struct Queue<K> {
    state: Mutex<State<K>>,
    changed: Notify,
}

struct State<K> {
    order: BTreeSet<(Instant, K)>,
    due: HashMap<K, Instant>,
    running: HashSet<K>,
    failures: HashMap<K, u32>,
    hasher: RandomState,
}

impl<K: Clone + Eq + Ord + Hash> Queue<K> {
    pub(crate) fn new() -> Self {
        let state = State {
            order: BTreeSet::new(),
            due: HashMap::new(),
            running: HashSet::new(),
            failures: HashMap::new(),
            hasher: RandomState::new(),
        };
        Self { state: Mutex::new(state), changed: Notify::new() }
    }

    /// Asks for a key now.
    pub(crate) fn add(&self, key: K) {
        self.lock().schedule(key, Instant::now());
        self.changed.notify_waiters();
    }

    async fn next(&self) -> K {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let next = self.lock().take(Instant::now());
            match next {
                Ok(key) => return key,
                Err(Some(at)) => {
                    tokio::select! { () = changed => {}, () = tokio::time::sleep_until(at) => {} }
                }
                Err(None) => changed.await,
            }
        }
    }

    fn done(&self, key: K, again: Again) {
        let mut state = self.lock();
        state.running.remove(&key);
        let now = Instant::now();
        let failures = state.failures.remove(&key).unwrap_or(0).saturating_add(1);
        match again {
            Again::OnChange => {}
            Again::After(wait) => state.schedule(key, now + wait),
            Again::Backoff(least) => {
                // What came during the run came with its own writes, or is seen by the next one.
                state.unschedule(&key);
                state.failures.insert(key.clone(), failures);
                let wait = state.jitter(&key, failures, backoff(failures, least));
                state.schedule(key, now + wait);
            }
        }
        drop(state);
        self.changed.notify_waiters();
    }

    fn lock(&self) -> MutexGuard<'_, State<K>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Clone + Eq + Ord + Hash> State<K> {
    /// The earlier of two times for one key holds.
    fn schedule(&mut self, key: K, at: Instant) {
        if self.due.get(&key).is_some_and(|known| *known <= at) {
            return;
        }
        self.unschedule(&key);
        self.due.insert(key.clone(), at);
        self.order.insert((at, key));
    }

    fn unschedule(&mut self, key: &K) {
        if let Some(at) = self.due.remove(key) {
            self.order.remove(&(at, key.clone()));
        }
    }

    /// Takes the next key that is due and not running; else says when one will be due.
    fn take(&mut self, now: Instant) -> Result<K, Option<Instant>> {
        let next = self.order.iter().find(|(_, key)| !self.running.contains(key)).cloned();
        match next {
            Some((at, key)) if at <= now => {
                self.unschedule(&key);
                self.running.insert(key.clone());
                Ok(key)
            }
            Some((at, _)) => Err(Some(at)),
            None => Err(None),
        }
    }

    /// Up to a quarter more, so that keys that failed together do not return together.
    fn jitter(&self, key: &K, failures: u32, wait: Duration) -> Duration {
        let random = u32::try_from(self.hasher.hash_one((key, failures)) % 256).unwrap_or(0);
        wait + wait * random / 1024
    }
}

fn backoff(failures: u32, least: Duration) -> Duration {
    let doublings = failures.saturating_sub(1).min(16);
    (FIRST_BACKOFF.max(least) * 2u32.pow(doublings)).min(LONGEST_BACKOFF.max(least))
}

/// Works through a queue, `width` keys at once, until told to stop; then finishes what was begun.
pub(crate) async fn drain<K, F, Fut>(queue: Arc<Queue<K>>, width: usize, stop: CancellationToken, work: F)
where
    K: Clone + Debug + Eq + Ord + Hash + Send + 'static,
    F: Fn(K) -> Fut,
    Fut: Future<Output = Again> + Send + 'static,
{
    let mut running = JoinSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            key = queue.next(), if running.len() < width => {
                let (queue, work) = (Arc::clone(&queue), work(key.clone()));
                running.spawn(async move { queue.done(key, work.await) });
            }
            Some(_) = running.join_next() => {}
        }
    }
    while running.join_next().await.is_some() {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(base: Instant, n: u64) -> Instant {
        base + Duration::from_secs(n)
    }

    #[test]
    fn a_key_that_runs_is_not_started_twice_but_runs_once_more() {
        let (queue, now) = (Queue::new(), Instant::now());
        queue.lock().schedule(1, now);
        queue.lock().schedule(1, now);
        assert_eq!(queue.lock().take(now), Ok(1));
        queue.lock().schedule(1, now);
        queue.lock().schedule(2, now);
        assert_eq!(queue.lock().take(now), Ok(2), "1 is running");
        queue.done(1, Again::OnChange);
        assert_eq!(queue.lock().take(now), Ok(1));
        queue.done(1, Again::OnChange);
        assert_eq!(queue.lock().take(now), Err(None));
    }

    #[test]
    fn an_event_comes_before_a_planned_run_and_replaces_it() {
        let (queue, now) = (Queue::new(), Instant::now());
        queue.lock().schedule(1, seconds(now, 60));
        assert_eq!(queue.lock().take(now), Err(Some(seconds(now, 60))));
        queue.lock().schedule(1, now);
        queue.lock().schedule(1, seconds(now, 9));
        assert_eq!(queue.lock().take(now), Ok(1));
        queue.done(1, Again::OnChange);
        assert_eq!(queue.lock().take(seconds(now, 60)), Err(None));
    }

    #[test]
    fn backoff_doubles_to_a_cap_and_starts_at_its_floor() {
        let millis = |n, least| backoff(n, Duration::from_secs(least)).as_millis();
        assert_eq!([millis(1, 0), millis(2, 0), millis(30, 0)], [50, 100, 60_000]);
        assert_eq!([millis(1, 5), millis(2, 5), millis(9, 5)], [5000, 10_000, 60_000]);
    }

    #[test]
    fn a_failure_waits_whatever_came_during_the_run() {
        let (queue, now) = (Queue::new(), Instant::now());
        queue.lock().schedule(1, now);
        assert_eq!(queue.lock().take(now), Ok(1));
        queue.lock().schedule(1, now);
        queue.done(1, Again::Backoff(Duration::from_secs(5)));
        assert!(queue.lock().take(now).is_err());
        queue.lock().schedule(1, now);
        assert_eq!(queue.lock().take(now), Ok(1), "news after the failure counts at once");
    }

    #[test]
    fn success_forgets_failures() {
        let queue = Queue::new();
        queue.done(1, Again::Backoff(Duration::ZERO));
        queue.done(1, Again::Backoff(Duration::ZERO));
        assert_eq!(queue.lock().failures.get(&1), Some(&2));
        queue.done(1, Again::OnChange);
        assert!(queue.lock().failures.is_empty());
    }
}
