//! What bounds restarts because of a leak, beside the rates of policies: a restart hides a leak and
//! begins its story anew, so it is done seldom, and not again where it changed nothing.
//!
//! All times are multiples of the policy's horizon, as those of the detector belong together: with the
//! default of an hour a workload is restarted once in 6 h. They are counted from act to act. When the
//! memory of the next pod was first suspected says nothing: a slow leak is suspected soon, and due
//! after days.
//!
//! That is longer than tokens are kept, so these restarts are remembered beside the tokens, two of a
//! workload: whether the later of them was in vain is noted in it, so that no longer story is needed.

use std::collections::BTreeMap;

use highwater_crds::Leaks;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::{Act, CREATION_ROUNDED, Request, Said, Token, TokenLedger};
use crate::leak::Settings;

/// A workload is restarted because of a leak at most once in so many horizons.
pub const EVERY_HORIZONS: i32 = 6;
/// A leak that is due for an act again so many horizons after a restart is the same leak. For so long
/// a restart is remembered.
const SAME_WITHIN_HORIZONS: i32 = 24;
/// A slope of so much of the one before is no lower; the profile of a life says the same.
const NO_LOWER_PERCENT: i128 = 80;
/// The restarts of one workload that are remembered, the latest.
const OF_A_WORKLOAD: usize = 2;
/// And those of all workloads together. What is older than [`EVERY_HORIZONS`] makes room.
const IN_ALL: usize = 2000;
/// What a restart takes beside the names in it, in bytes.
const PAST_BYTES: usize = 100;

/// The horizon of a policy, or of one that says nothing.
pub fn horizon(leaks: &Leaks) -> SignedDuration {
    given(leaks.horizon_milliseconds, Settings::default().horizon_milliseconds)
}

/// What a policy says that a drain, a start and a warm-up take together, or one that says nothing.
pub fn lead(leaks: &Leaks) -> SignedDuration {
    given(leaks.lead_milliseconds, Settings::default().lead_milliseconds)
}

fn given(milliseconds: Option<i32>, default: u64) -> SignedDuration {
    let milliseconds = milliseconds.map_or_else(|| i64::try_from(default).unwrap_or(i64::MAX), i64::from);
    SignedDuration::from_millis(milliseconds)
}

/// The leak that an act is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leak {
    /// Horizon of the policy.
    pub horizon: SignedDuration,
    /// Slope in bytes an hour.
    pub slope: i64,
}

impl Leak {
    /// So many horizons, in milliseconds.
    fn horizons(&self, count: i32) -> i64 {
        let horizon = i64::try_from(self.horizon.as_millis()).unwrap_or(i64::MAX);
        horizon.saturating_mul(count.into())
    }
}

/// The restarts that are remembered, by namespace and workload, each list in the order of time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct Remembered(BTreeMap<String, Vec<Past>>);

/// A restart because of a leak. Times are in milliseconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Past {
    at: i64,
    /// UID of the pod.
    pod: String,
    /// Slope in bytes an hour of the leak.
    slope: i64,
    /// UID of the incident, where the containers are restarted in place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    in_place: Option<String>,
    /// When the restart before it was, if this one followed because that one was in vain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    again: Option<i64>,
    /// How long it is remembered.
    until: i64,
}

impl Past {
    /// Whether it is the restart of this request itself, or one of its pod that was reserved and never
    /// done: a pod that is there to be evicted was not evicted before.
    fn is_of(&self, key: &str, own: &Token) -> bool {
        match &self.in_place {
            Some(incident) => incident == incident_of(key),
            None => self.pod == own.pod,
        }
    }

    /// Whether this pod came out of it.
    fn led_to(&self, own: &Token) -> bool {
        if self.in_place.is_some() {
            return self.pod == own.pod;
        }
        let born = own.born.and_then(|born| born.checked_add(CREATION_ROUNDED).ok());
        self.pod != own.pod && born.is_some_and(|born| born.as_millisecond() > self.at)
    }

    /// Until when the workload is not restarted again.
    fn rests_until(&self) -> i64 {
        let kept = self.until.saturating_sub(self.at);
        let rests = kept.saturating_mul(EVERY_HORIZONS.into()) / i64::from(SAME_WITHIN_HORIZONS);
        self.at.saturating_add(rests)
    }
}

impl Remembered {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Drops what nothing counts any more.
    pub(super) fn forget(&mut self, now: Timestamp) {
        let now = now.as_millisecond();
        self.0.retain(|_, past| {
            past.retain(|past| now <= past.until);
            !past.is_empty()
        });
    }

    /// About how many bytes they take as text.
    pub(super) fn bytes(&self) -> usize {
        let of = |past: &Past| {
            let names = past.pod.len().saturating_add(past.in_place.as_ref().map_or(0, String::len));
            names.saturating_add(PAST_BYTES)
        };
        let workloads = self.0.iter().map(|(name, past)| past.iter().map(of).sum::<usize>() + name.len());
        workloads.fold(0, usize::saturating_add)
    }

    fn len(&self) -> usize {
        self.0.values().map(Vec::len).sum()
    }

    /// Restarts of the workload of `own`, but for the one that `key` stands for.
    fn others<'a>(&'a self, key: &'a str, own: &'a Token) -> impl Iterator<Item = &'a Past> {
        let past = self.0.get(&workload(own)).into_iter().flatten();
        past.filter(move |past| !past.is_of(key, own))
    }

    /// Restarts out of which this pod came, to be due again soon and no more slowly.
    fn in_vain<'a>(&'a self, key: &'a str, own: &'a Token, leak: Leak) -> impl Iterator<Item = &'a Past> {
        let now = own.at.as_millisecond();
        self.others(key, own).filter(move |past| {
            let after = now.saturating_sub(past.at);
            let no_lower = i128::from(leak.slope) * 100 >= i128::from(past.slope) * NO_LOWER_PERCENT;
            after > 0 && after <= leak.horizons(SAME_WITHIN_HORIZONS) && no_lower && past.led_to(own)
        })
    }
}

fn workload(own: &Token) -> String {
    format!("{}/{}", own.namespace, own.workload)
}

fn incident_of(key: &str) -> &str {
    key.split_once('/').map_or(key, |(incident, _)| incident)
}

/// The leak for which somebody is to be restarted; None where it is another act, or for no leak.
fn restart(request: &Request<'_>) -> Option<Leak> {
    request.leak.filter(|_| matches!(request.token.act, Some(Act::Restart | Act::RestartInPlace)))
}

/// What the seldom restart of a leaking workload says to a request. `None`: it asks for another act.
pub(super) fn rate(ledger: &TokenLedger, request: &Request<'_>) -> Option<Said> {
    let own = &request.token;
    let window = restart(request)?.horizons(EVERY_HORIZONS);
    let now = own.at.as_millisecond();
    let last = ledger.leaks.others(request.key, own).map(|past| past.at).max();
    let last = last.filter(|at| now.saturating_sub(*at) < window);
    let verdict = if last.is_some() { "refused" } else { "allowed" };
    Some(Said {
        refused: last.is_some(),
        until: last.and_then(|at| Timestamp::from_millisecond(at.saturating_add(window)).ok()),
        text: format!(
            "leaks: 1 restart of a workload in {} s ({EVERY_HORIZONS} horizons): {} spent: {verdict}",
            window / 1000,
            i32::from(last.is_some()),
        ),
    })
}

/// The ledger with the time of an act that had its token before and is done only now, as after a wait
/// for a disruption budget. `None`: it is for no leak.
pub(super) fn renewed(ledger: &TokenLedger, request: &Request<'_>) -> Option<TokenLedger> {
    restart(request)?;
    let mut next = ledger.clone();
    next.remember(request);
    Some(next)
}

impl TokenLedger {
    /// Why another restart of a leaking workload would be in vain, if it would: it was restarted twice
    /// in a row, and each time the pod that came out of it leaked no more slowly. `own` is the token
    /// that would be reserved under `key`, at the time of the act.
    pub fn leaks_on(&self, key: &str, own: &Token, leak: Leak) -> Option<String> {
        let second = self.leaks.in_vain(key, own, leak).max_by_key(|past| (past.again.is_some(), past.at))?;
        let first = second.again?;
        let ago = |at: i64| own.at.as_millisecond().saturating_sub(at) / 60_000;
        Some(format!(
            "{} was restarted because of a leak {} min and {} min before, and each time it leaked no more slowly: a restart does not help; its team has to look",
            own.workload,
            ago(first),
            ago(second.at),
        ))
    }

    /// Makes room for one more restart that is to be remembered: what only says whether restarts are in
    /// vain goes, the oldest first. `Some`: there is none.
    pub(super) fn make_room(&mut self, request: &Request<'_>) -> Option<Said> {
        restart(request)?;
        let now = request.token.at.as_millisecond();
        while self.leaks.len() >= IN_ALL {
            let rested = self.leaks.0.iter().filter_map(|(name, past)| {
                let first = past.first().filter(|past| past.rests_until() <= now)?;
                Some((first.at, name.clone()))
            });
            let Some((_, name)) = rested.min() else {
                return Some(Said {
                    refused: true,
                    until: None,
                    text: format!("the ledger is full with {IN_ALL} restarts because of leaks"),
                });
            };
            if let Some(past) = self.leaks.0.get_mut(&name) {
                past.remove(0);
            }
            self.leaks.0.retain(|_, past| !past.is_empty());
        }
        None
    }

    /// Notes a restart because of a leak, if the request is for one, as done at its time.
    pub(super) fn remember(&mut self, request: &Request<'_>) {
        let Some(leak) = restart(request) else { return };
        let (key, own) = (request.key, &request.token);
        let at = own.at.as_millisecond();
        let past = Past {
            at,
            pod: own.pod.clone(),
            slope: leak.slope,
            in_place: (own.act == Some(Act::RestartInPlace)).then(|| incident_of(key).to_owned()),
            again: self.leaks.in_vain(key, own, leak).map(|past| past.at).max(),
            until: at.saturating_add(leak.horizons(SAME_WITHIN_HORIZONS)),
        };
        let of_it = self.leaks.0.entry(workload(own)).or_default();
        of_it.retain(|past| !past.is_of(key, own));
        of_it.push(past);
        of_it.sort_by_key(|past| past.at);
        let surplus = of_it.len().saturating_sub(OF_A_WORKLOAD);
        of_it.drain(..surplus);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::{collection::vec, prelude::*};

    use super::*;
    use crate::budget::{Answer, Limits, reserve};

    const HORIZON: SignedDuration = SignedDuration::from_secs(3600);

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn leak(slope: i64) -> Leak {
        Leak { horizon: HORIZON, slope }
    }

    fn token(pod: &str, born: i64, second: i64) -> Token {
        Token {
            at: at(second),
            policy: "p".into(),
            workload: "Deployment/w".into(),
            namespace: "team".into(),
            node: "n1".into(),
            pod: pod.into(),
            act: Some(Act::Restart),
            born: Some(at(born)),
            keep_until: None,
        }
    }

    fn ask_for(ledger: &TokenLedger, key: &str, token: Token, leak: Option<Leak>) -> Answer {
        let request = Request {
            key,
            token,
            unavailable: &BTreeSet::new(),
            enforced: false,
            longest_window_minutes: 60,
            leak,
        };
        reserve(ledger, &Limits::default(), &request)
    }

    fn ask(ledger: &TokenLedger, key: &str, token: Token, slope: i64) -> Answer {
        ask_for(ledger, key, token, Some(leak(slope)))
    }

    fn granted(answer: Answer) -> TokenLedger {
        match answer {
            Answer::Reserved { ledger: Some(ledger), .. } => ledger,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_policy_that_says_nothing_has_an_hour_and_ten_minutes() {
        let leaks = Leaks::default();
        assert_eq!((horizon(&leaks).as_mins(), lead(&leaks).as_mins()), (60, 10));
        let short = Leaks { horizon_milliseconds: Some(2500), lead_milliseconds: Some(500), ..leaks };
        assert_eq!((horizon(&short).as_millis(), lead(&short).as_millis()), (2500, 500));
    }

    #[test]
    fn a_leaking_workload_is_restarted_once_in_six_hours() {
        let ledger = granted(ask(&TokenLedger::default(), "i/a", token("a", 0, 0), 1));
        let six_hours = 6 * 3600;
        let answer = ask(&ledger, "j/b", token("b", 1, six_hours - 1), 1);
        let Answer::Refused { said, retry_at } = answer else { panic!() };
        assert_eq!(retry_at, Some(at(six_hours)));
        assert!(said[0].contains("1 restart of a workload in 21600 s (6 horizons): 1 spent: refused"));
        granted(ask(&ledger, "j/b", token("b", 1, six_hours), 1));
        let other = Token { workload: "Deployment/x".into(), ..token("x", 0, 5) };
        granted(ask(&ledger, "x/x", other, 1));
        granted(ask_for(&ledger, "j/b", token("b", 1, 60), None));
        let next = granted(ask_for(&ledger, "j/b", token("b", 1, 5 * 3600), None));
        assert!(!next.holds("i/a"), "its token is long forgotten");
        assert!(matches!(ask(&next, "k/c", token("c", 1, 5 * 3600), 1), Answer::Refused { .. }));
    }

    #[test]
    fn six_hours_are_counted_from_the_act_and_not_from_when_its_token_was_reserved() {
        let reserved = granted(ask(&TokenLedger::default(), "i/a", token("a", 0, 0), 1));
        // A disruption budget kept it for five hours.
        let done = granted(ask(&reserved, "i/a", token("a", 0, 5 * 3600), 1));
        assert_eq!(done.len(), 1, "its own token is no obstacle, and there is no second one");
        let answer = ask(&done, "j/b", token("b", 1, 7 * 3600), 1);
        let Answer::Refused { retry_at, .. } = answer else { panic!() };
        assert_eq!(retry_at, Some(at(11 * 3600)));
        // Of two that have their tokens the second waits for the first.
        let both = granted(ask(&reserved, "j/b", token("b", 1, 6 * 3600), 1));
        assert!(matches!(ask(&both, "i/a", token("a", 0, 6 * 3600 + 9), 1), Answer::Refused { .. }));
    }

    #[test]
    fn a_restart_that_was_refused_does_not_keep_its_own_pod_waiting() {
        let refused = granted(ask(&TokenLedger::default(), "i/a", token("a", 0, 0), 1));
        granted(ask(&refused, "j/a", token("a", 0, 600), 1));
        let in_place = Token { act: Some(Act::RestartInPlace), ..token("a", 0, 0) };
        let done = granted(ask(&TokenLedger::default(), "i/a", in_place.clone(), 1));
        let again = Token { at: at(600), ..in_place };
        assert!(matches!(ask(&done, "j/a", again, 1), Answer::Refused { .. }), "that one may have been done");
    }

    #[test]
    fn two_restarts_that_did_not_lower_the_slope_are_enough() {
        let restarted = |slopes: [i64; 2]| {
            let first = granted(ask(&TokenLedger::default(), "i/a", token("a", 0, 0), slopes[0]));
            granted(ask(&first, "j/b", token("b", 1, 8 * 3600), slopes[1]))
        };
        let third = token("c", 8 * 3600 + 1, 16 * 3600);
        let in_vain = |ledger: &TokenLedger, third: &Token, slope| ledger.leaks_on("k/c", third, leak(slope));
        let why = in_vain(&restarted([100, 100]), &third, 100).unwrap();
        assert!(why.contains("960 min and 480 min before"), "{why}");
        assert!(in_vain(&restarted([100, 90]), &third, 75).is_some());
        assert_eq!(in_vain(&restarted([100, 70]), &third, 70), None, "the first one helped");
        assert_eq!(in_vain(&restarted([100, 100]), &third, 70), None, "the second one helped");
        let late = token("c", 8 * 3600 + 1, 33 * 3600);
        assert_eq!(in_vain(&restarted([100, 100]), &late, 100), None, "it held for a day");
        let sibling = token("d", 0, 16 * 3600);
        assert_eq!(in_vain(&restarted([100, 100]), &sibling, 100), None, "it was never restarted");
    }

    #[test]
    fn pods_that_were_restarted_in_place_are_known_by_their_uid() {
        let token = |second| Token { act: Some(Act::RestartInPlace), ..token("a", 0, second) };
        let once = granted(ask(&TokenLedger::default(), "i/a", token(0), 100));
        let twice = granted(ask(&once, "j/a", token(8 * 3600), 100));
        assert!(twice.leaks_on("k/a", &token(16 * 3600), leak(100)).is_some());
        assert_eq!(twice.leaks_on("j/a", &token(9 * 3600), leak(100)), None, "its own is none before it");
    }

    #[test]
    fn of_two_replicas_that_are_restarted_in_turn_each_is_remembered() {
        let mut ledger = TokenLedger::default();
        for (n, (pod, born)) in [("a1", -9), ("b1", -9), ("a2", 1), ("b2", 7)].into_iter().enumerate() {
            let hour = 6 * i64::try_from(n).unwrap();
            let token = token(pod, born * 3600, hour * 3600);
            ledger = granted(ask(&ledger, &format!("i{n}/{pod}"), token, 100));
        }
        let third = token("a3", 12 * 3600 + 1, 24 * 3600);
        assert!(ledger.leaks_on("k/a3", &third, leak(100)).is_some());
    }

    #[test]
    fn a_ledger_of_an_earlier_version_knows_of_no_leaks() {
        let text = granted(ask(&TokenLedger::default(), "i/a", token("a", 0, 0), 5)).to_text().unwrap();
        let (earlier, _) = text.split_once(r#","leaks""#).unwrap();
        let earlier = TokenLedger::parse(&format!("{earlier}}}")).unwrap();
        granted(ask(&earlier, "j/b", token("b", 1, 1), 5));
        assert_eq!(TokenLedger::parse(&text).unwrap().to_text().unwrap(), text);
    }

    #[test]
    fn the_ledger_stays_small_with_a_thousand_workloads_that_leak_for_days() {
        let uid = |n: i64| format!("0d5c8a31-4b62-4f0e-9d3a-{n:012}");
        let mut ledger = TokenLedger::default();
        // Each is restarted as often as it may be, one after the other.
        for n in 0..3000_i64 {
            let (workload, second) = (n % 1000, n * 6 * 36 / 10);
            let token = Token {
                policy: "leaks-of-serving".into(),
                workload: format!("Deployment/model-server-{workload:04}"),
                namespace: "team-serving".into(),
                node: format!("gpu-{workload:04}.example.com"),
                ..token(&uid(n), second - 5, second)
            };
            let key = crate::budget::key(&uid(n), &token.pod);
            ledger = granted(ask(&ledger, &key, token, 1 << 30));
        }
        let text = ledger.to_text().unwrap();
        assert_eq!(ledger.leaks.len(), 2000, "two of each");
        assert!(text.len() < 512 << 10, "{}", text.len());
        let thought = ledger.bytes();
        assert!(thought >= text.len() && thought < text.len() / 4 * 5, "{thought}, not {}", text.len());
    }

    #[test]
    fn what_is_no_longer_needed_makes_room_and_what_is_makes_none() {
        let mut ledger = TokenLedger::default();
        for n in 0..IN_ALL {
            let past =
                Past { at: 0, pod: "p".into(), slope: 1, in_place: None, again: None, until: 24 * 3_600_000 };
            ledger.leaks.0.insert(format!("team/w{n}"), vec![past]);
        }
        let answer = ask(&ledger, "i/a", token("a", 0, 6 * 3600 - 1), 1);
        let Answer::Refused { said, .. } = answer else { panic!() };
        assert!(said[0].contains("full with 2000 restarts"), "{said:?}");
        granted(ask_for(&ledger, "i/a", token("a", 0, 60), None));
        assert_eq!(granted(ask(&ledger, "i/a", token("a", 0, 6 * 3600), 1)).leaks.len(), IN_ALL);
        assert_eq!(granted(ask(&ledger, "i/a", token("a", 0, 24 * 3600 + 1), 1)).leaks.len(), 1);
    }

    proptest! {
        /// Whoever asks, in whatever order, how often its act has to wait with its token and however late
        /// its news is stored: two restarts of one workload because of leaks are at least six horizons
        /// apart, from act to act.
        #[test]
        fn never_two_restarts_of_a_leaking_workload_at_once(
            steps in vec((0..2usize, 0..5usize, 0..4usize, 0..9000i64, any::<bool>()), 1..80),
        ) {
            let (mut stored, mut version, mut now) = (TokenLedger::default(), 0u64, 0i64);
            let mut pending: [Option<(u64, TokenLedger, usize, i64)>; 2] = [None, None];
            let mut generation = [0; 5];
            let mut acts: Vec<i64> = Vec::new();
            for (leader, pod, event, wait, done) in steps {
                now += wait;
                match event {
                    0 => pending[leader] = None, // crash
                    1 | 2 => {
                        let uid = format!("{pod}-{}", generation[pod]);
                        let asked = ask(&stored, &format!("i{uid}/{uid}"), token(&uid, 0, now), 1);
                        if let Answer::Reserved { ledger: Some(next), .. } = asked {
                            pending[leader] = Some((version, next, pod, now));
                        }
                    }
                    _ => if let Some((read, next, pod, asked)) = pending[leader].take() && read == version {
                        (stored, version) = (next, version + 1);
                        if done {
                            acts.push(asked);
                            generation[pod] += 1;
                        }
                    }
                }
            }
            acts.sort_unstable();
            for pair in acts.windows(2) {
                prop_assert!(pair[1] - pair[0] >= 6 * 3600, "{pair:?}");
            }
        }
    }
}
