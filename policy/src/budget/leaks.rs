//! What bounds restarts because of a leak, beside the rates of policies: a restart hides a leak and
//! begins its story anew, so it is done seldom, and not again where it changed nothing.
//!
//! All times are multiples of the policy's horizon, as those of the detector belong together: with the
//! default of an hour a workload is restarted once in 6 h.

use highwater_crds::Leaks;
use jiff::{SignedDuration, Timestamp};

use super::{Act, Request, Said, Token, TokenLedger};
use crate::leak::Settings;

/// A workload is restarted because of a leak at most once in so many horizons.
pub const EVERY_HORIZONS: i32 = 6;
/// A leak that is due for an act again so many horizons after a restart is the same leak.
const SAME_WITHIN_HORIZONS: i32 = 24;
/// How long restarts are remembered, so that two in a row are.
const REMEMBERED_HORIZONS: i32 = 2 * SAME_WITHIN_HORIZONS;
/// A slope of so much of the one before is no lower; the profile of a life says the same.
const NO_LOWER_PERCENT: i128 = 80;

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

fn restarts(token: &Token) -> bool {
    matches!(token.act, Some(Act::Restart | Act::RestartInPlace)) && token.leak.is_some()
}

fn times(horizon: SignedDuration, count: i32) -> SignedDuration {
    horizon.checked_mul(count).unwrap_or(SignedDuration::MAX)
}

/// Until when the token of a restart because of a leak is kept at least.
pub(super) fn kept_until(request: &Request<'_>) -> Option<Timestamp> {
    let horizon = request.leak_horizon.filter(|_| restarts(&request.token))?;
    request.token.at.checked_add(times(horizon, REMEMBERED_HORIZONS)).ok()
}

/// What the seldom restart of a leaking workload says to a request. `None`: it asks for another act.
pub(super) fn rate(ledger: &TokenLedger, request: &Request<'_>) -> Option<Said> {
    let own = &request.token;
    let horizon = request.leak_horizon.filter(|_| restarts(own))?;
    let window = times(horizon, EVERY_HORIZONS);
    let last = ledger.of_workload(request.key, own).filter(|t| restarts(t)).map(|t| t.at).max();
    let last = last.filter(|at| own.at.duration_since(*at) < window);
    let verdict = if last.is_some() { "refused" } else { "allowed" };
    Some(Said {
        refused: last.is_some(),
        until: last.and_then(|at| at.checked_add(window).ok()),
        text: format!(
            "leaks: 1 restart of a workload in {} s ({EVERY_HORIZONS} horizons): {} spent: {verdict}",
            window.as_secs(),
            i32::from(last.is_some()),
        ),
    })
}

impl TokenLedger {
    /// Why another restart of a leaking workload would be in vain, if it would: it was restarted twice
    /// in a row, and each time the pod that came out of it leaked no more slowly. `own` is the token
    /// that would be reserved under `key`.
    pub fn leaks_on(&self, key: &str, own: &Token, horizon: SignedDuration) -> Option<String> {
        let within = times(horizon, SAME_WITHIN_HORIZONS);
        let came_back = |earlier: &Token, later: &Token| {
            let after = later.at.duration_since(earlier.at);
            let no_lower = earlier
                .leak
                .zip(later.leak)
                .is_some_and(|(before, now)| i128::from(now) * 100 >= i128::from(before) * NO_LOWER_PERCENT);
            after.is_positive()
                && after <= within
                && no_lower
                && restarts(earlier)
                && earlier.led_to(&later.pod, later.born)
        };
        let past: Vec<&Token> = self.of_workload(key, own).collect();
        past.iter().filter(|second| came_back(second, own)).find_map(|second| {
            let first = past.iter().find(|first| came_back(first, second))?;
            let ago = |token: &Token| own.at.duration_since(token.at).as_mins();
            Some(format!(
                "{} was restarted because of a leak {} min and {} min before, and each time it leaked no more slowly: a restart does not help; its team has to look",
                own.workload,
                ago(first),
                ago(second),
            ))
        })
    }

    /// The tokens of the workload of `own`, but for the one under `key`.
    fn of_workload<'a>(&'a self, key: &'a str, own: &'a Token) -> impl Iterator<Item = &'a Token> {
        let workload = move |t: &Token| (&t.namespace, &t.workload) == (&own.namespace, &own.workload);
        self.tokens.iter().filter(move |(k, t)| *k != key && workload(t)).map(|(_, t)| t)
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

    fn token(pod: &str, born: i64, second: i64, slope: i64) -> Token {
        Token {
            at: at(second),
            policy: "p".into(),
            workload: "Deployment/w".into(),
            namespace: "team".into(),
            node: "n1".into(),
            pod: pod.into(),
            act: Some(Act::Restart),
            born: Some(at(born)),
            leak: Some(slope),
            keep_until: None,
        }
    }

    fn ask(ledger: &TokenLedger, key: &str, token: Token) -> Answer {
        let request = Request {
            key,
            token,
            unavailable: &BTreeSet::new(),
            enforced: false,
            longest_window_minutes: 60,
            leak_horizon: Some(HORIZON),
        };
        reserve(ledger, &Limits::default(), &request)
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
        let ledger = granted(ask(&TokenLedger::default(), "i/a", token("a", 0, 0, 1)));
        let six_hours = 6 * 3600;
        let answer = ask(&ledger, "j/b", token("b", 1, six_hours - 1, 1));
        let Answer::Refused { said, retry_at } = answer else { panic!() };
        assert_eq!(retry_at, Some(at(six_hours)));
        assert!(said[0].contains("1 restart of a workload in 21600 s (6 horizons): 1 spent: refused"));
        let again = ask(&ledger, "i/a", token("a", 0, 5, 1));
        assert!(matches!(again, Answer::Reserved { ledger: None, .. }), "its own token is no obstacle");
        granted(ask(&ledger, "j/b", token("b", 1, six_hours, 1)));
        let other = Token { workload: "Deployment/x".into(), ..token("x", 0, 5, 1) };
        granted(ask(&ledger, "x/x", other));
        let breach = Token { leak: None, ..token("b", 1, 60, 1) };
        granted(ask(&ledger, "j/b", breach));
    }

    #[test]
    fn two_restarts_that_did_not_lower_the_slope_are_enough() {
        let restarted = |slopes: [i64; 2]| {
            let first = granted(ask(&TokenLedger::default(), "i/a", token("a", 0, 0, slopes[0])));
            granted(ask(&first, "j/b", token("b", 1, 8 * 3600, slopes[1])))
        };
        let third = |slope| token("c", 8 * 3600 + 1, 16 * 3600, slope);
        let why = restarted([100, 100]).leaks_on("k/c", &third(100), HORIZON).unwrap();
        assert!(why.contains("960 min and 480 min before"), "{why}");
        assert!(restarted([100, 90]).leaks_on("k/c", &third(75), HORIZON).is_some());
        assert_eq!(restarted([100, 70]).leaks_on("k/c", &third(70), HORIZON), None, "the first one helped");
        assert_eq!(restarted([100, 100]).leaks_on("k/c", &third(70), HORIZON), None, "the second one helped");
        let late = token("c", 8 * 3600 + 1, 33 * 3600, 100);
        assert_eq!(restarted([100, 100]).leaks_on("k/c", &late, HORIZON), None, "it held for a day");
        let sibling = token("d", 0, 16 * 3600, 100);
        assert_eq!(restarted([100, 100]).leaks_on("k/d", &sibling, HORIZON), None, "it was never restarted");
    }

    #[test]
    fn a_ledger_of_an_earlier_version_knows_of_no_leaks() {
        let text = granted(ask(&TokenLedger::default(), "i/a", token("a", 0, 0, 5))).to_text().unwrap();
        assert!(text.contains(r#""leak":5"#), "{text}");
        let earlier = TokenLedger::parse(&text.replace(r#","leak":5"#, "")).unwrap();
        granted(ask(&earlier, "j/b", token("b", 1, 1, 5)));
    }

    proptest! {
        /// Whoever asks, in whatever order and however late its news is stored: two restarts of one
        /// workload because of leaks are at least six horizons apart.
        #[test]
        fn never_two_restarts_of_a_leaking_workload_at_once(
            steps in vec((0..2usize, 0..5usize, 0..3usize, 0..9000i64), 1..80),
        ) {
            let (mut stored, mut version, mut now) = (TokenLedger::default(), 0u64, 0i64);
            let mut pending: [Option<(u64, TokenLedger)>; 2] = [None, None];
            let mut granted: Vec<i64> = Vec::new();
            for (leader, pod, event, wait) in steps {
                now += wait;
                match event {
                    0 => pending[leader] = None, // crash
                    1 => {
                        let (key, pod) = (format!("i{now}/{pod}"), format!("pod{pod}"));
                        if let Answer::Reserved { ledger: Some(next), .. } = ask(&stored, &key, token(&pod, 0, now, 1)) {
                            pending[leader] = Some((version, next));
                        }
                    }
                    _ => if let Some((read, next)) = pending[leader].take() && read == version {
                        granted.extend(
                            next.tokens.iter().filter(|(k, _)| !stored.holds(k)).map(|(_, t)| t.at.as_second()),
                        );
                        (stored, version) = (next, version + 1);
                    }
                }
            }
            granted.sort_unstable();
            for pair in granted.windows(2) {
                prop_assert!(pair[1] - pair[0] >= 6 * 3600, "{pair:?}");
            }
        }
    }
}
