//! How many acts there may be: tokens that are reserved before an act and never given back.
//!
//! The ledger of tokens is one small object, changed by compare-and-swap. A token belongs to one
//! incident and one pod: asking for it again, after a crash or by another leader, finds it and
//! spends nothing.

use std::collections::{BTreeMap, BTreeSet};

use highwater_crds::{ActionType, Budget, Proposal, RateScope};
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::resolve::Policy;

pub mod leaks;

/// Format of the stored ledger.
const VERSION: u32 = 1;
/// Most tokens that are stored. A full ledger refuses.
const CAPACITY: usize = 3000;
/// Most bytes that it may take: an object is at most 1 MiB.
const MOST_BYTES: usize = 900 << 10;
/// What a token takes beside its names, in bytes: braces, fields and times.
const TOKEN_BYTES: usize = 220;
/// A token as young as this counts as a pod that is down, or as a node that is drained, whatever its
/// state: the news of an act takes this long at most to come back.
const SETTLING: SignedDuration = SignedDuration::from_secs(10);
/// How soon after a restart memory runs high again where the restart did not help.
pub const IN_VAIN_WITHIN: SignedDuration = SignedDuration::from_secs(3600);
/// How long tokens are kept at least, so that two restarts in a row are remembered.
const REMEMBERED: SignedDuration = SignedDuration::from_secs(2 * 3600);
/// Times of creation are whole seconds, rounded down.
const CREATION_ROUNDED: SignedDuration = SignedDuration::from_secs(1);
/// Fewer condemned devices than this never halt the fleet: in a small fleet one device is already
/// a large share of it.
pub const HALT_AT_LEAST: usize = 3;

/// The reserved tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenLedger {
    version: u32,
    tokens: BTreeMap<String, Token>,
    /// Restarts because of leaks, which are remembered for longer than tokens are kept.
    #[serde(default, skip_serializing_if = "leaks::Remembered::is_empty")]
    leaks: leaks::Remembered,
}

impl Default for TokenLedger {
    fn default() -> Self {
        Self { version: VERSION, tokens: BTreeMap::new(), leaks: leaks::Remembered::default() }
    }
}

/// The right to one act, spent when it was reserved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Token {
    /// When it was reserved.
    pub at: Timestamp,
    /// The policy that asked for the act.
    pub policy: String,
    /// Top owner of the pod, as `Kind/name`.
    pub workload: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// The node.
    pub node: String,
    /// UID of the pod. Empty where the act is a cordon.
    pub pod: String,
    /// What the act is. None: a version wrote it that did not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub act: Option<Act>,
    /// When the pod was created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub born: Option<Timestamp>,
    /// Until when it is kept at least: the longest window of any policy when it was reserved. A
    /// policy that is away for a while does not shorten the memory of the others' acts.
    #[serde(rename = "keepUntil", default, skip_serializing_if = "Option::is_none")]
    pub keep_until: Option<Timestamp>,
}

/// What a token was spent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Act {
    /// Eviction of a pod, so that its owner starts it anew.
    Restart,
    /// Restart of a pod's containers where they are.
    RestartInPlace,
    /// A pod taken out of its Services.
    Unready,
    /// GPU memory of a pod moved to the host.
    Park,
    /// A node cordoned, or a pod evicted from it.
    Drain,
}

impl Act {
    /// The act that an incident proposes. None for those that need no token.
    pub const fn of(proposed: &Proposal) -> Option<Self> {
        match proposed.action {
            ActionType::Unready => Some(Self::Unready),
            ActionType::Park => Some(Self::Park),
            ActionType::Restart if proposed.in_place => Some(Self::RestartInPlace),
            ActionType::Restart => Some(Self::Restart),
            ActionType::Drain => Some(Self::Drain),
            ActionType::Signal | ActionType::Hook | ActionType::Freeze | ActionType::Reclaim => None,
        }
    }
}

impl Token {
    /// Whether the act is that no more pods are scheduled to a node, so that it can be drained.
    fn is_cordon(&self) -> bool {
        self.act == Some(Act::Drain) && self.pod.is_empty()
    }

    /// Whether this pod came out of the restart that the token was spent on.
    fn led_to(&self, pod: &str, born: Option<Timestamp>) -> bool {
        match self.act {
            Some(Act::RestartInPlace) => self.pod == pod,
            Some(Act::Restart) => {
                let born = born.and_then(|born| born.checked_add(CREATION_ROUNDED).ok());
                self.pod != pod && born.is_some_and(|born| born > self.at)
            }
            _ => false,
        }
    }

    fn is_kept(&self, now: Timestamp, window: SignedDuration) -> bool {
        now.duration_since(self.at) <= window || self.keep_until.is_some_and(|until| now <= until)
    }

    /// About how many bytes it takes.
    fn bytes(&self) -> usize {
        let names = [&self.policy, &self.workload, &self.namespace, &self.node, &self.pod];
        names.iter().fold(TOKEN_BYTES, |sum, name| sum.saturating_add(name.len()))
    }
}

/// Why a stored ledger cannot be used. Nothing is done without it, since that might spend a
/// budget twice.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// It is not JSON of the expected shape.
    #[error(
        "the token ledger cannot be read ({0}): repair or delete the ConfigMap; deleting it forgets past acts"
    )]
    Malformed(#[from] serde_json::Error),
    /// A later version wrote it.
    #[error("the token ledger has format {0}, which a later version wrote: go back to that version")]
    Later(u32),
}

impl TokenLedger {
    /// Reads a stored ledger.
    pub fn parse(text: &str) -> Result<Self, LedgerError> {
        let ledger: Self = serde_json::from_str(text)?;
        if ledger.version > VERSION { Err(LedgerError::Later(ledger.version)) } else { Ok(ledger) }
    }

    /// The text to store.
    pub fn to_text(&self) -> Result<String, LedgerError> {
        Ok(serde_json::to_string(self)?)
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Drops the tokens that nothing counts any more.
    fn forget(&mut self, now: Timestamp, longest_window_minutes: i32) {
        let window = window(longest_window_minutes);
        self.tokens.retain(|_, token| token.is_kept(now, window));
        self.leaks.forget(now);
    }

    /// About how many bytes it takes as text.
    fn bytes(&self) -> usize {
        let tokens = self.tokens.iter().map(|(key, token)| key.len().saturating_add(token.bytes()));
        tokens.fold(self.leaks.bytes(), usize::saturating_add)
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Whether this act has its token.
    pub fn holds(&self, key: &str) -> bool {
        self.tokens.contains_key(key)
    }

    /// Whether an incident has a token beside this one, but for those that were spent in vain.
    pub fn has_other(&self, incident_uid: &str, key: &str, in_vain: impl Fn(&Token) -> bool) -> bool {
        let own = |k: &str| k.strip_prefix(incident_uid).is_some_and(|rest| rest.starts_with('/'));
        self.tokens.iter().any(|(k, token)| k != key && own(k) && !in_vain(token))
    }

    /// The tokens.
    pub fn tokens(&self) -> impl Iterator<Item = &Token> {
        self.tokens.values()
    }

    /// Why another restart of a workload would be in vain, if it would: its memory ran high again
    /// within [`IN_VAIN_WITHIN`] of a restart, twice in a row. `own` is the token that would be
    /// reserved under `key`, with the time at which memory ran high. Only pods that came out of a
    /// restart count against it: several replicas that are over at once are not one that comes back.
    pub fn in_vain(&self, key: &str, own: &Token) -> Option<String> {
        let workload = |t: &Token| (&t.namespace, &t.workload) == (&own.namespace, &own.workload);
        let restarts: Vec<&Token> =
            self.tokens.iter().filter(|(k, t)| *k != key && workload(t)).map(|(_, t)| t).collect();
        let came_back = |earlier: &Token, later: &Token| {
            let after = later.at.duration_since(earlier.at);
            after.is_positive() && after <= IN_VAIN_WITHIN && earlier.led_to(&later.pod, later.born)
        };
        restarts.iter().find_map(|second| {
            let first = restarts.iter().find(|first| came_back(first, second))?;
            came_back(second, own).then(|| {
                format!(
                    "{} was restarted {} min and {} min before, and each time its memory ran high again within {} min: a restart does not help; its team has to look (limit too small, or a leak)",
                    own.workload,
                    own.at.duration_since(first.at).as_mins(),
                    own.at.duration_since(second.at).as_mins(),
                    IN_VAIN_WITHIN.as_mins(),
                )
            })
        })
    }
}

/// The key of the token for an act on a pod by an incident.
pub fn key(incident_uid: &str, pod_uid: &str) -> String {
    format!("{incident_uid}/{pod_uid}")
}

/// What the budgets of several policies come to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Most pods of a workload that may be down, and the policy that says so.
    max_unavailable: Option<(i32, String)>,
    /// The share of devices at which the fleet halts, in percent, and the policy that says so.
    halt: Option<(i32, String)>,
    rates: Vec<RateLimit>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct RateLimit {
    policy: String,
    scope: RateScope,
    most: usize,
    minutes: i32,
}

impl Limits {
    /// The strictest of the budgets of the policies that bind an act.
    pub fn strictest<'a>(policies: impl IntoIterator<Item = &'a Policy>) -> Self {
        let mut limits = Self::default();
        for policy in policies {
            if let Some(budget) = policy.spec.remediation.as_ref().and_then(|r| r.budget.as_ref()) {
                limits.add(&policy.name, budget);
            }
        }
        limits
    }

    fn add(&mut self, policy: &str, budget: &Budget) {
        let stricter = |known: &mut Option<(i32, String)>, value: i32| {
            if known.as_ref().is_none_or(|(least, _)| value < *least) {
                *known = Some((value, policy.to_owned()));
            }
        };
        stricter(&mut self.max_unavailable, budget.max_unavailable);
        stricter(&mut self.halt, budget.halt_at_condemned_percent);
        self.rates.extend(budget.rates.iter().map(|rate| RateLimit {
            policy: policy.to_owned(),
            scope: rate.scope,
            most: usize::try_from(rate.max_actions).unwrap_or(0),
            minutes: rate.window_minutes,
        }));
    }

    /// What the rates say about an act.
    fn rates(&self, ledger: &TokenLedger, own: &Token) -> Vec<Said> {
        let concerned = |rate: &&RateLimit| rate.scope != RateScope::Policy || rate.policy == own.policy;
        self.rates.iter().filter(concerned).map(|rate| rate.check(ledger, own)).collect()
    }

    /// Why the whole fleet stands still, if it does: so many devices at once have somebody to be
    /// acted on, or so many nodes are to be drained, that the measurement is more likely wrong than
    /// they are.
    pub fn fleet_halt(&self, fleet: &Fleet) -> Option<String> {
        let (percent, policy) = self.halt.as_ref()?;
        let share = usize::try_from(*percent).unwrap_or(0);
        let too_many = |condemned: usize, all: usize| {
            condemned >= HALT_AT_LEAST && condemned.saturating_mul(100) > all.saturating_mul(share)
        };
        let what = if too_many(fleet.condemned_devices, fleet.devices) {
            format!(
                "{} of {} devices have a pod to be acted on at once",
                fleet.condemned_devices, fleet.devices
            )
        } else if too_many(fleet.condemned_nodes, fleet.nodes) {
            format!("{} of {} nodes are to be drained at once", fleet.condemned_nodes, fleet.nodes)
        } else {
            return None;
        };
        Some(format!(
            "{what}, more than haltAtCondemnedPercent {percent} of policy {policy}: that looks like a fault of measurement"
        ))
    }

    /// The policy whose share halts the fleet first.
    pub fn halting(&self) -> Option<&str> {
        self.halt.as_ref().map(|(_, policy)| policy.as_str())
    }
}

/// How much of the fleet is condemned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fleet {
    /// Devices with a pod to be acted on.
    pub condemned_devices: usize,
    /// Devices in all.
    pub devices: usize,
    /// Nodes to be drained.
    pub condemned_nodes: usize,
    /// Nodes in all that have devices.
    pub nodes: usize,
}

/// A request for a token.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// See [`key`].
    pub key: &'a str,
    /// The token as it would be stored; its time is that of the request.
    pub token: Token,
    /// UIDs of the workload's pods that are not ready or have an act in flight; for a cordon the names
    /// of the nodes that are being drained.
    pub unavailable: &'a BTreeSet<String>,
    /// Whether the act is for good. Such an act needs a policy that bounds it.
    pub enforced: bool,
    /// The longest window of any policy in minutes; older tokens are forgotten.
    pub longest_window_minutes: i32,
    /// The leak that the act is for: see [`leaks`]. None where it is for none.
    pub leak: Option<leaks::Leak>,
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The act may go on. `ledger` is to be stored first; None where there is nothing to store.
    Reserved {
        /// The ledger with the token, and with the time of the act where it is for a leak.
        ledger: Option<TokenLedger>,
        /// What each budget said.
        said: Vec<String>,
    },
    /// Not now.
    Refused {
        /// What each budget said, refusals first.
        said: Vec<String>,
        /// When a token comes free, where that is a matter of time.
        retry_at: Option<Timestamp>,
    },
}

/// Reserves a token, if every limit allows it. A token that is there already has paid the rates,
/// but its act still waits while too many pods of the workload are down, or while another of them was
/// restarted because of a leak not long ago.
pub fn reserve(ledger: &TokenLedger, limits: &Limits, request: &Request<'_>) -> Answer {
    let now = request.token.at;
    let mut said: Vec<Said> = Vec::new();
    match &limits.max_unavailable {
        Some((most, policy)) => said.push(unavailable(ledger, request, *most, policy)),
        None if request.enforced => said.push(Said {
            refused: true,
            until: None,
            text: "no policy says how many pods may be down: set remediation.budget.maxUnavailable"
                .to_owned(),
        }),
        None => {}
    }
    said.extend(leaks::rate(ledger, request));
    if ledger.holds(request.key) {
        if said.iter().any(|s| s.refused) {
            return refused(said);
        }
        said.push(Said { refused: false, until: None, text: "the token was reserved before".to_owned() });
        return Answer::Reserved { ledger: leaks::renewed(ledger, request), said: texts(&said) };
    }
    said.extend(limits.rates(ledger, &request.token));
    let mut next = ledger.clone();
    next.forget(now, request.longest_window_minutes);
    said.extend(full(&next));
    said.extend(next.make_room(request));
    if said.iter().any(|s| s.refused) {
        return refused(said);
    }
    next.version = VERSION;
    next.remember(request);
    let keep_until = now.checked_add(window(request.longest_window_minutes)).ok();
    next.tokens.insert(request.key.to_owned(), Token { keep_until, ..request.token.clone() });
    Answer::Reserved { ledger: Some(next), said: texts(&said) }
}

/// Whether the rates have room for all of these acts together, which will be done one after the
/// other: what could not be finished is better not begun. Nothing is reserved; how many pods of a
/// workload may be down is asked before each.
pub fn room_for(
    ledger: &TokenLedger,
    limits: &Limits,
    acts: &[(String, Token)],
    longest_window_minutes: i32,
) -> Answer {
    let mut next = ledger.clone();
    let mut last = Vec::new();
    for (key, token) in acts {
        if next.holds(key) {
            continue;
        }
        next.forget(token.at, longest_window_minutes);
        let mut said = limits.rates(&next, token);
        said.extend(full(&next));
        if said.iter().any(|s| s.refused) {
            return refused(said);
        }
        next.tokens.insert(key.clone(), token.clone());
        last = said;
    }
    Answer::Reserved { ledger: None, said: texts(&last) }
}

fn refused(mut said: Vec<Said>) -> Answer {
    // The last of the refusals to end decides; one that no time ends leaves it open.
    let refusals: Vec<_> = said.iter().filter(|s| s.refused).map(|s| s.until).collect();
    let retry_at = refusals.iter().copied().collect::<Option<Vec<_>>>().and_then(|r| r.into_iter().max());
    said.sort_by_key(|s| !s.refused);
    Answer::Refused { said: texts(&said), retry_at }
}

fn full(ledger: &TokenLedger) -> Option<Said> {
    (ledger.len() >= CAPACITY || ledger.bytes() >= MOST_BYTES).then(|| Said {
        refused: true,
        until: None,
        text: format!("the ledger is full with {} tokens", ledger.len()),
    })
}

/// How long a token is kept at least.
fn window(longest_window_minutes: i32) -> SignedDuration {
    SignedDuration::from_mins(longest_window_minutes.into()).max(REMEMBERED)
}

struct Said {
    refused: bool,
    until: Option<Timestamp>,
    text: String,
}

fn texts(said: &[Said]) -> Vec<String> {
    // The incident's schema takes 16 lines of 256 characters.
    said.iter().take(16).map(|s| s.text.chars().take(256).collect()).collect()
}

fn unavailable(ledger: &TokenLedger, request: &Request<'_>, most: i32, policy: &str) -> Said {
    let own = &request.token;
    if own.is_cordon() {
        return draining(ledger, request, most, policy);
    }
    let mut down: BTreeSet<&str> = request.unavailable.iter().map(String::as_str).collect();
    down.extend(
        ledger
            .tokens()
            .filter(|t| (&t.namespace, &t.workload) == (&own.namespace, &own.workload))
            .filter(|t| own.at.duration_since(t.at) < SETTLING)
            .map(|t| t.pod.as_str()),
    );
    down.remove(own.pod.as_str());
    let with_victim = down.len() + 1;
    let refused = with_victim > usize::try_from(most).unwrap_or(0);
    let verdict = if refused { "refused" } else { "allowed" };
    Said {
        refused,
        until: None,
        text: format!("maxUnavailable {most} (policy {policy}): {with_victim} with this pod: {verdict}"),
    }
}

/// As many nodes may be drained at a time as pods of a workload may be down.
fn draining(ledger: &TokenLedger, request: &Request<'_>, most: i32, policy: &str) -> Said {
    let own = &request.token;
    let most_nodes = usize::try_from(most).unwrap_or(0);
    let mut nodes: BTreeSet<&str> = request.unavailable.iter().map(String::as_str).collect();
    nodes.remove(own.node.as_str());
    let known = nodes.len();
    // Of several that begin at once, none is heard of yet.
    let is_young = |t: &&Token| t.is_cordon() && own.at.duration_since(t.at) < SETTLING && t.node != own.node;
    let young: Vec<&Token> = ledger.tokens().filter(is_young).collect();
    nodes.extend(young.iter().map(|t| t.node.as_str()));
    let refused = nodes.len() >= most_nodes;
    let some: Vec<&str> = nodes.iter().take(4).copied().collect();
    let text = if refused {
        format!("{} nodes are being drained ({}): refused", nodes.len(), some.join(", "))
    } else {
        format!("{} with this node: allowed", nodes.len() + 1)
    };
    let settled = young.iter().map(|t| t.at).min().and_then(|at| at.checked_add(SETTLING).ok());
    Said {
        refused,
        // Of those that are known nobody knows when they end.
        until: settled.filter(|_| refused && known < most_nodes),
        text: format!("maxUnavailable {most} (policy {policy}): {text}"),
    }
}

impl RateLimit {
    fn check(&self, ledger: &TokenLedger, own: &Token) -> Said {
        let window = SignedDuration::from_mins(self.minutes.into());
        let mut spent: Vec<Timestamp> = ledger
            .tokens()
            .filter(|t| self.scope.covers(t, own))
            .map(|t| t.at)
            .filter(|at| own.at.duration_since(*at) < window)
            .collect();
        spent.sort_unstable();
        let refused = spent.len() >= self.most;
        // One comes free when so many have left the window that fewer than `most` are in it.
        let leaves = spent.len().checked_sub(self.most).and_then(|i| spent.get(i)).filter(|_| self.most > 0);
        Said {
            refused,
            until: leaves.and_then(|at| at.checked_add(window).ok()).filter(|_| refused),
            text: format!(
                "rate {:?} {} in {} min (policy {}): {} spent: {}",
                self.scope,
                self.most,
                self.minutes,
                self.policy,
                spent.len(),
                if refused { "refused" } else { "allowed" }
            ),
        }
    }
}

/// Whether a past token counts against the one that is asked for.
trait Covers {
    fn covers(self, past: &Token, own: &Token) -> bool;
}

impl Covers for RateScope {
    fn covers(self, past: &Token, own: &Token) -> bool {
        match self {
            Self::Policy => past.policy == own.policy,
            Self::Workload => (&past.namespace, &past.workload) == (&own.namespace, &own.workload),
            Self::Node => past.node == own.node,
            Self::Namespace => past.namespace == own.namespace,
            Self::Fleet => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use highwater_crds::Rate;
    use proptest::{collection::vec, prelude::*};

    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn token(pod: &str, second: i64) -> Token {
        Token {
            at: at(second),
            policy: "p".into(),
            workload: "Deployment/w".into(),
            namespace: "team".into(),
            node: "n1".into(),
            pod: pod.into(),
            act: Some(Act::Restart),
            born: None,
            keep_until: None,
        }
    }

    /// A ledger in which pods of one workload were restarted: (pod, created at, restarted at).
    fn restarted(tokens: &[(&str, i64, i64)]) -> TokenLedger {
        let mut ledger = TokenLedger::default();
        for (pod, born, second) in tokens {
            let token = Token { born: Some(at(*born)), ..token(pod, *second) };
            ledger.tokens.insert(key("i", pod), token);
        }
        ledger
    }

    fn limits(max_unavailable: i32, rates: &[(RateScope, i32)]) -> Limits {
        let mut limits = Limits::default();
        let rates = rates
            .iter()
            .map(|(scope, most)| Rate { scope: *scope, max_actions: *most, window_minutes: 60 })
            .collect();
        limits.add("p", &Budget { max_unavailable, halt_at_condemned_percent: 20, rates });
        limits
    }

    fn ask(ledger: &TokenLedger, limits: &Limits, pod: &str, second: i64) -> Answer {
        let (key, unavailable) = (key("i", pod), BTreeSet::new());
        let request = Request {
            key: &key,
            token: token(pod, second),
            unavailable: &unavailable,
            enforced: true,
            longest_window_minutes: 60,
            leak: None,
        };
        reserve(ledger, limits, &request)
    }

    fn granted(answer: Answer) -> TokenLedger {
        match answer {
            Answer::Reserved { ledger: Some(ledger), .. } => ledger,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_rate_refuses_until_a_token_leaves_the_window() {
        let limits = limits(9, &[(RateScope::Workload, 1)]);
        let ledger = granted(ask(&TokenLedger::default(), &limits, "a", 0));
        let Answer::Refused { said, retry_at } = ask(&ledger, &limits, "b", 100) else { panic!() };
        assert_eq!(retry_at, Some(at(3600)));
        assert!(said[0].contains("rate Workload 1 in 60 min (policy p): 1 spent: refused"), "{said:?}");
        granted(ask(&ledger, &limits, "b", 3600));
    }

    #[test]
    fn asking_again_finds_the_token_even_when_nothing_is_left() {
        let limits = limits(1, &[(RateScope::Fleet, 1)]);
        let ledger = granted(ask(&TokenLedger::default(), &limits, "a", 0));
        assert!(matches!(ask(&ledger, &limits, "a", 5), Answer::Reserved { ledger: None, .. }));
    }

    #[test]
    fn another_policys_rate_a_policy_does_not_count_acts_of_this_one() {
        let mut limits = limits(9, &[(RateScope::Policy, 5)]);
        let none = Rate { scope: RateScope::Policy, max_actions: 0, window_minutes: 60 };
        limits.add("q", &Budget { max_unavailable: 9, halt_at_condemned_percent: 20, rates: vec![none] });
        granted(ask(&TokenLedger::default(), &limits, "a", 0));
    }

    #[test]
    fn the_strictest_max_unavailable_holds_and_counts_unready_pods_and_fresh_tokens() {
        let mut limits = limits(2, &[]);
        limits.add("strict", &Budget { max_unavailable: 1, halt_at_condemned_percent: 9, rates: vec![] });
        let ledger = granted(ask(&TokenLedger::default(), &limits, "a", 0));
        let Answer::Refused { said, retry_at: None } = ask(&ledger, &limits, "b", 5) else { panic!() };
        assert!(said[0].contains("maxUnavailable 1 (policy strict): 2 with this pod"), "{said:?}");
        granted(ask(&ledger, &limits, "b", 11));

        let down = BTreeSet::from(["other".to_owned()]);
        let request = Request {
            key: "k",
            token: token("b", 11),
            unavailable: &down,
            enforced: true,
            longest_window_minutes: 60,
            leak: None,
        };
        assert!(matches!(reserve(&TokenLedger::default(), &limits, &request), Answer::Refused { .. }));
        let own = BTreeSet::from(["b".to_owned()]);
        let request = Request { unavailable: &own, ..request };
        assert!(matches!(reserve(&TokenLedger::default(), &limits, &request), Answer::Reserved { .. }));
    }

    #[test]
    fn a_held_token_skips_the_rates_but_not_max_unavailable() {
        let limits = limits(1, &[(RateScope::Fleet, 1)]);
        let ledger = granted(ask(&TokenLedger::default(), &limits, "a", 0));
        let (key, down) = (key("i", "a"), BTreeSet::from(["other".to_owned()]));
        let request = Request {
            key: &key,
            token: token("a", 60),
            unavailable: &down,
            enforced: true,
            longest_window_minutes: 60,
            leak: None,
        };
        let Answer::Refused { said, retry_at: None } = reserve(&ledger, &limits, &request) else { panic!() };
        assert!(said[0].contains("maxUnavailable 1 (policy p): 2 with this pod: refused"), "{said:?}");
        let none = BTreeSet::new();
        let request = Request { unavailable: &none, ..request };
        assert!(matches!(reserve(&ledger, &limits, &request), Answer::Reserved { ledger: None, .. }));
    }

    #[test]
    fn an_enforced_act_that_nothing_bounds_is_refused() {
        let unbounded = Limits::default();
        let Answer::Refused { said, .. } = ask(&TokenLedger::default(), &unbounded, "a", 0) else { panic!() };
        assert!(said[0].contains("remediation.budget.maxUnavailable"), "{said:?}");
        let none = BTreeSet::new();
        let rehearsed = Request {
            key: "k",
            token: token("a", 0),
            unavailable: &none,
            enforced: false,
            longest_window_minutes: 60,
            leak: None,
        };
        let answer = reserve(&TokenLedger::default(), &unbounded, &rehearsed);
        assert!(matches!(answer, Answer::Reserved { .. }));
    }

    #[test]
    fn a_token_outlives_a_policy_with_a_long_window_that_is_away() {
        let limits = limits(9, &[(RateScope::Fleet, 9)]);
        let none = BTreeSet::new();
        let request = |key, pod, second, window| Request {
            key,
            token: token(pod, second),
            unavailable: &none,
            enforced: true,
            longest_window_minutes: window,
            leak: None,
        };
        let day = granted(reserve(&TokenLedger::default(), &limits, &request("a", "a", 0, 24 * 60)));
        let later = granted(reserve(&day, &limits, &request("b", "b", 7300, 60)));
        assert!(later.holds("a") && later.holds("b"));
        let next_day = granted(reserve(&later, &limits, &request("c", "c", 24 * 3600 + 1, 60)));
        assert!(!next_day.holds("a") && !next_day.holds("b"));
    }

    #[test]
    fn a_rate_of_zero_never_lets_through() {
        let answer = ask(&TokenLedger::default(), &limits(9, &[(RateScope::Node, 0)]), "a", 0);
        assert!(matches!(answer, Answer::Refused { retry_at: None, .. }));
    }

    #[test]
    fn old_tokens_are_forgotten_and_a_full_ledger_refuses() {
        let limits = limits(i32::MAX, &[]);
        let mut ledger = TokenLedger::default();
        for i in 0..CAPACITY {
            ledger.tokens.insert(format!("k{i}"), token(&i.to_string(), 0));
        }
        assert!(matches!(ask(&ledger, &limits, "a", 60), Answer::Refused { .. }));
        assert!(matches!(ask(&ledger, &limits, "a", 7200), Answer::Refused { .. }));
        assert_eq!(granted(ask(&ledger, &limits, "a", 7201)).len(), 1);
        let long =
            |i: usize| Token { node: "n".repeat(253), policy: "p".repeat(253), ..token(&i.to_string(), 0) };
        ledger.tokens = (0..).map(|i| (format!("k{i}"), long(i))).take(CAPACITY / 2).collect();
        assert!(
            matches!(ask(&ledger, &limits, "a", 60), Answer::Refused { .. }),
            "long names fill it sooner"
        );
        ledger.tokens.pop_first();
        while ledger.bytes() >= MOST_BYTES {
            ledger.tokens.pop_first();
        }
        assert!(granted(ask(&ledger, &limits, "a", 60)).to_text().unwrap().len() < 1 << 20);
    }

    #[test]
    fn the_fleet_halts_above_the_share_but_not_for_one_or_two_devices() {
        let limits = limits(1, &[]);
        let devices = |condemned_devices, devices| {
            limits.fleet_halt(&Fleet { condemned_devices, devices, ..Fleet::default() })
        };
        assert_eq!(devices(2, 2), None);
        assert_eq!(devices(3, 15), None);
        assert!(devices(4, 15).unwrap().contains("4 of 15 devices"));
        let nodes = |condemned_nodes, nodes| {
            limits.fleet_halt(&Fleet { condemned_nodes, nodes, devices: 8000, ..Fleet::default() })
        };
        assert_eq!(nodes(50, 1000), None, "d02: the truly sick are dealt with");
        let said = nodes(1000, 1000).unwrap();
        assert!(said.contains("1000 of 1000 nodes") && said.contains("haltAtCondemnedPercent 20"), "{said}");
    }

    #[test]
    fn two_restarts_in_a_row_that_did_not_help_are_enough() {
        let again = |ledger: &TokenLedger, pod: &str, born: i64, second: i64| {
            let own = Token { born: Some(at(born)), ..token(pod, second) };
            ledger.in_vain(&key("i", pod), &own)
        };
        let twice = restarted(&[("a", 0, 1000), ("b", 1000, 2000)]);
        let why = again(&twice, "c", 2001, 3000).unwrap();
        assert!(why.contains("Deployment/w was restarted 33 min and 16 min before"), "{why}");
        assert_eq!(again(&twice, "c", 2001, 2000 + 3601), None, "it held for an hour");
        let once = restarted(&[("a", 0, 1000)]);
        assert_eq!(again(&once, "c", 2001, 3000), None);
        let apart = restarted(&[("a", 0, 1000), ("b", 1000, 1000 + 3700)]);
        assert_eq!(again(&apart, "c", 4800, 5000), None, "the first one had helped");
    }

    #[test]
    fn replicas_that_are_over_at_once_are_not_one_that_comes_back() {
        let replicas = restarted(&[("a", 0, 1000), ("b", 0, 1100), ("c", 0, 1200)]);
        let own = Token { born: Some(at(0)), ..token("d", 1300) };
        assert_eq!(replicas.in_vain("k", &own), None);
        let own = Token { born: Some(at(1201)), ..own };
        assert_eq!(replicas.in_vain("k", &own), None, "it is back once, not twice");
    }

    #[test]
    fn a_pod_restarted_in_place_twice_is_known_by_its_uid() {
        let mut ledger = TokenLedger::default();
        for (incident, second) in [("i1", 1000), ("i2", 2000)] {
            let token = Token { act: Some(Act::RestartInPlace), born: Some(at(0)), ..token("a", second) };
            ledger.tokens.insert(key(incident, "a"), token);
        }
        let own = Token { act: Some(Act::RestartInPlace), born: Some(at(0)), ..token("a", 3000) };
        assert!(ledger.in_vain(&key("i3", "a"), &own).is_some());
        assert_eq!(ledger.in_vain(&key("i2", "a"), &own), None, "its own token is no earlier restart");
    }

    #[test]
    fn a_drain_is_not_begun_that_the_rates_would_not_let_end() {
        let limits = limits(9, &[(RateScope::Fleet, 3)]);
        let acts = |n: usize| -> Vec<(String, Token)> {
            (0..n).map(|i| (format!("k{i}"), token(&format!("p{i}"), 100))).collect()
        };
        let none = TokenLedger::default();
        assert!(matches!(room_for(&none, &limits, &acts(3), 60), Answer::Reserved { .. }));
        assert!(matches!(room_for(&none, &limits, &acts(4), 60), Answer::Refused { .. }));
        let spent = granted(ask(&none, &limits, "x", 50));
        assert!(matches!(room_for(&spent, &limits, &acts(3), 60), Answer::Refused { .. }));
        let mut half = none;
        half.tokens.insert("k0".into(), token("p0", 90));
        half.tokens.insert("k1".into(), token("p1", 95));
        assert!(matches!(room_for(&half, &limits, &acts(3), 60), Answer::Reserved { .. }), "two are paid");
    }

    #[test]
    fn a_drain_knows_whether_it_has_evicted_anybody() {
        let mut ledger = TokenLedger::default();
        ledger.tokens.insert("u/node/n1".into(), token("", 0));
        ledger.tokens.insert("u2/p".into(), token("p", 0));
        assert!(!ledger.has_other("u", "u/node/n1", |_| false));
        ledger.tokens.insert("u/p".into(), token("p", 0));
        assert!(ledger.has_other("u", "u/node/n1", |_| false));
        assert!(!ledger.has_other("u", "u/node/n1", |token| token.pod == "p"));
    }

    #[test]
    fn as_many_nodes_are_drained_at_once_as_pods_may_be_down() {
        let limits = limits(2, &[]);
        let cordon = |ledger: &TokenLedger, node: &str, known: &[&str], second: i64| {
            let (key, known) = (key(node, node), known.iter().map(|n| (*n).to_owned()).collect());
            let token = Token {
                workload: format!("Node/{node}"),
                node: node.to_owned(),
                act: Some(Act::Drain),
                ..token("", second)
            };
            let request = Request {
                key: &key,
                token,
                unavailable: &known,
                enforced: true,
                longest_window_minutes: 60,
                leak: None,
            };
            reserve(ledger, &limits, &request)
        };
        let refused = |answer| match answer {
            Answer::Refused { said, retry_at } => (said.join("; "), retry_at),
            other @ Answer::Reserved { .. } => panic!("{other:?}"),
        };
        let none = TokenLedger::default();
        let (said, until) = refused(cordon(&none, "n3", &["n1", "n2"], 0));
        assert!(said.contains("2 nodes are being drained (n1, n2): refused"), "{said}");
        assert_eq!(until, None);
        granted(cordon(&none, "n2", &["n1", "n2"], 0));

        // They begin at once, and nobody has heard of the others' beginning.
        let one = granted(cordon(&none, "n1", &[], 0));
        let two = granted(cordon(&one, "n2", &[], 1));
        let (said, until) = refused(cordon(&two, "n3", &[], 2));
        assert!(said.contains("2 nodes are being drained (n1, n2): refused"), "{said}");
        assert_eq!(until, Some(at(10)));
        refused(cordon(&two, "n3", &["n2"], 2));
        assert!(matches!(cordon(&two, "n2", &["n1"], 2), Answer::Reserved { ledger: None, .. }), "has begun");
        // By then it is known which of them are still drained.
        granted(cordon(&two, "n3", &["n2"], 11));
        refused(cordon(&two, "n3", &["n1", "n2"], 11));
        // An eviction from a node is none of a node.
        granted(ask(&two, &limits, "p", 2));
    }

    #[test]
    fn a_ledger_that_cannot_be_read_is_an_error_not_an_empty_one() {
        assert!(TokenLedger::parse("{}").is_err());
        assert!(matches!(TokenLedger::parse(r#"{"version": 9, "tokens": {}}"#), Err(LedgerError::Later(9))));
        let ledger = granted(ask(&TokenLedger::default(), &limits(1, &[]), "a", 0));
        assert_eq!(TokenLedger::parse(&ledger.to_text().unwrap()).unwrap(), ledger);
    }

    proptest! {
        /// Whatever two leaders ask, in whatever order, with crashes between reading and storing,
        /// no window ever holds more tokens than its rate allows, and no act has two.
        #[test]
        fn no_sequence_of_events_spends_a_budget_twice(
            steps in vec((0..2usize, 0..6usize, 0..3usize, 0..900i64), 1..80),
            most in 1..4i32,
        ) {
            let limits = limits(i32::MAX, &[(RateScope::Workload, most)]);
            let (mut stored, mut version, mut now) = (TokenLedger::default(), 0u64, 0i64);
            // What each leader has read but not yet stored: (version, ledger to store).
            let mut pending: [Option<(u64, TokenLedger)>; 2] = [None, None];
            let mut granted: Vec<(String, i64)> = Vec::new();
            for (leader, pod, event, wait) in steps {
                now += wait;
                match event {
                    0 => pending[leader] = None, // crash
                    1 => {
                        let pod = format!("pod{pod}");
                        if let Answer::Reserved { ledger: Some(next), .. } = ask(&stored, &limits, &pod, now) {
                            pending[leader] = Some((version, next));
                        }
                    }
                    _ => if let Some((read, next)) = pending[leader].take() && read == version {
                        for (key, token) in &next.tokens {
                            if !stored.tokens.contains_key(key) {
                                granted.push((key.clone(), token.at.as_second()));
                            }
                        }
                        (stored, version) = (next, version + 1);
                    }
                }
            }
            for (_, start) in &granted {
                let in_window = granted.iter().filter(|(_, t)| (0..3600).contains(&(t - start))).count();
                prop_assert!(in_window <= usize::try_from(most).unwrap());
            }
            for (i, (key, t)) in granted.iter().enumerate() {
                prop_assert!(!granted.iter().take(i).any(|(k, u)| k == key && (t - u).abs() <= 3600));
            }
        }
    }
}
