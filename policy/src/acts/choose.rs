//! Walks through the acts in force, gentlest first, until what is begun may be enough.

use std::cmp::Reverse;

use highwater_crds::{Action, ActionType, BreakerScope, Level, WhenNobodyIsOver};

use super::{
    Act, Alternative, Cannot, Frees, MAX_ALTERNATIVES, Outcome, Plan, Situation, Tenant, Tried, Verdict,
    WhyNot,
    ability::{self, is_at_once, patience},
};

pub(super) fn plan(situation: &Situation<'_>) -> Plan {
    if situation.need == 0 {
        return Plan::default();
    }
    let mut walk = Walk::new(situation);
    for type_ in ActionType::ALL {
        let Some(action) = situation.actions.iter().find(|action| action.type_ == type_) else { continue };
        match type_ {
            ActionType::Signal => walk.signal(),
            ActionType::Freeze => walk.freeze(),
            ActionType::Reclaim => walk.reclaim(),
            ActionType::Hook | ActionType::Unready | ActionType::Park => walk.pods(type_),
            ActionType::Restart => walk.restart(action),
            ActionType::Drain => walk.drain(),
        }
    }
    walk.end()
}

struct Walk<'a> {
    situation: &'a Situation<'a>,
    /// The tenants in the order in which they are acted on.
    order: Vec<usize>,
    /// Somebody is over its due, so that nobody within its due is acted on.
    somebody_over: bool,
    /// Somebody who was asked to end and whose memory is on its way back.
    leaving: Option<usize>,
    /// Bytes that will, or may, go by what is under way or begun now.
    covered: u64,
    /// Nobody may be restarted, since nobody is over its due.
    no_culprit: bool,
    /// How many alternatives each act may tell.
    lines: usize,
    plan: Plan,
}

impl<'a> Walk<'a> {
    fn new(situation: &'a Situation<'a>) -> Self {
        let tenants = situation.tenants;
        let is_leaving = |tenant: &Tenant<'_>| tenant.is_leaving(situation.wall);
        let mut order: Vec<usize> = (0..tenants.len()).collect();
        order.sort_by_cached_key(|place| {
            tenants.get(*place).map(|tenant| {
                let over = tenant.over();
                (over == 0, tenant.pod.priority, Reverse(over), Reverse(tenant.used), tenant.pod.uid.as_str())
            })
        });
        // A pod that should have ended long ago does not keep others from being acted on.
        let is_over =
            |tenant: &Tenant<'_>| tenant.over() > 0 && (!tenant.pod.terminating || is_leaving(tenant));
        Self {
            situation,
            somebody_over: situation.scope != BreakerScope::Pod && tenants.iter().any(is_over),
            leaving: order.iter().copied().find(|place| {
                tenants.get(*place).is_some_and(|tenant| is_leaving(tenant) && tenant.used.unwrap_or(0) > 0)
            }),
            covered: tenants
                .iter()
                .filter(|tenant| is_leaving(tenant))
                .fold(0, |sum, tenant| sum.saturating_add(tenant.used.unwrap_or(0))),
            no_culprit: false,
            lines: (MAX_ALTERNATIVES / situation.actions.len().max(1)).max(1),
            order,
            plan: Plan::default(),
        }
    }

    fn is_enough(&self) -> bool {
        self.covered >= self.situation.need
    }

    /// Whether what an act frees counts at the present level.
    fn counts(&self, act: ActionType) -> bool {
        self.situation.level != Level::Emergency || is_at_once(act, self.situation.scope)
    }

    fn cover(&mut self, act: ActionType, frees: Frees) {
        if self.counts(act) {
            self.covered = self.covered.saturating_add(frees.most());
        }
    }

    /// Nothing stronger is begun before the outcome of this is known.
    fn wait(&mut self) {
        self.covered = self.covered.max(self.situation.need);
    }

    fn tried(&self, act: ActionType, uid: Option<&str>) -> Option<&'a Tried<'a>> {
        self.situation.tried.iter().find(|tried| tried.act == act && tried.uid == uid)
    }

    /// Whether the outcome of an act is still waited for.
    fn is_live(&self, tried: &Tried<'_>) -> bool {
        let waited = self.situation.now.since(tried.begun);
        tried.outcome == Outcome::Pending && patience(tried.act).is_none_or(|patience| waited < patience)
    }

    fn begin(&mut self, action: ActionType, tenant: Option<usize>, frees: Frees, in_place: bool) {
        self.plan.begin.push(Act { action, tenant, frees, in_place });
    }

    fn pass_over(
        &mut self,
        action: ActionType,
        tenant: Option<usize>,
        frees: Option<Frees>,
        why_not: WhyNot,
    ) {
        let told = self.plan.alternatives.iter().rev().take_while(|other| other.action == action).count();
        if told < self.lines {
            self.plan.alternatives.push(Alternative { action, tenant, frees, why_not });
        }
    }

    fn tenant(&self, place: usize) -> Option<&'a Tenant<'a>> {
        self.situation.tenants.get(place)
    }

    /// The tenant at a place of the order, with its place among the tenants.
    fn at(&self, at: usize) -> Option<(usize, &'a Tenant<'a>)> {
        let place = *self.order.get(at)?;
        Some((place, self.tenant(place)?))
    }

    /// Told to everybody who listens, as soon as the level is entered.
    fn signal(&mut self) {
        let act = ActionType::Signal;
        for at in 0..self.order.len() {
            let Some((place, tenant)) = self.at(at) else { continue };
            match ability::on_pod(act, self.situation, tenant) {
                Err(cannot) => self.pass_over(act, Some(place), None, WhyNot::Cannot(cannot)),
                Ok(frees) => match self.tried(act, Some(&tenant.pod.uid)) {
                    None => {
                        self.begin(act, Some(place), frees, false);
                        self.cover(act, frees);
                    }
                    Some(tried) if self.is_live(tried) => self.cover(act, frees),
                    Some(tried) => self.pass_over(act, Some(place), None, WhyNot::Tried(tried.outcome)),
                },
            }
        }
    }

    /// Stops growth as soon as the level is entered, and has its time to be enough.
    fn freeze(&mut self) {
        let act = ActionType::Freeze;
        if self.situation.scope == BreakerScope::Pod {
            return self.pass_over(act, None, None, WhyNot::Cannot(Cannot::WholeDevice));
        }
        match self.tried(act, None) {
            None => self.begin(act, None, Frees::Growth, false),
            Some(tried) if !self.is_live(tried) => {
                return self.pass_over(act, None, None, WhyNot::Tried(tried.outcome));
            }
            Some(_) => {}
        }
        if self.counts(act) {
            self.wait();
        }
    }

    fn reclaim(&mut self) {
        let act = ActionType::Reclaim;
        let one = (self.situation.scope == BreakerScope::Pod).then_some(0);
        let uid = one.and_then(|place| self.tenant(place)).map(|tenant| tenant.pod.uid.as_str());
        match (ability::reclaim(self.situation), self.tried(act, uid)) {
            (Ok(frees), Some(tried)) if self.is_live(tried) => self.cover(act, frees),
            (_, Some(tried)) => self.pass_over(act, one, None, WhyNot::Tried(tried.outcome)),
            (Err(cannot), None) => self.pass_over(act, one, None, WhyNot::Cannot(cannot)),
            (Ok(frees), None) if self.is_enough() => {
                self.pass_over(act, one, Some(frees), WhyNot::NotNeeded);
            }
            (Ok(frees), None) => {
                self.begin(act, one, frees, false);
                self.cover(act, frees);
            }
        }
    }

    /// An act on single pods, several of which may be under way at once.
    fn pods(&mut self, act: ActionType) {
        let candidates = self.candidates(act);
        let missing = self.situation.need.saturating_sub(self.covered);
        let chosen = cheapest(&candidates, missing);
        for (place, frees) in candidates {
            if chosen.contains(&place) {
                self.begin(act, Some(place), frees, false);
                self.cover(act, frees);
            } else {
                self.pass_over(act, Some(place), Some(frees), WhyNot::NotNeeded);
            }
        }
    }

    /// The pods that an act may be begun on, in order. What is under way already is counted, and
    /// what cannot be done is told.
    fn candidates(&mut self, act: ActionType) -> Vec<(usize, Frees)> {
        let mut candidates = Vec::new();
        for at in 0..self.order.len() {
            let Some((place, tenant)) = self.at(at) else { continue };
            let ability = ability::on_pod(act, self.situation, tenant).and_then(|frees| {
                self.turn(act, tenant)?;
                Ok(frees)
            });
            match (self.tried(act, Some(&tenant.pod.uid)), ability) {
                (Some(tried), ability) if self.is_live(tried) => {
                    self.cover(act, ability.unwrap_or(Frees::UpTo(tenant.used.unwrap_or(0))));
                }
                (Some(tried), _) => self.pass_over(act, Some(place), None, WhyNot::Tried(tried.outcome)),
                (None, Ok(frees)) => candidates.push((place, frees)),
                (None, Err(cannot)) => self.pass_over(act, Some(place), None, WhyNot::Cannot(cannot)),
            }
        }
        candidates
    }

    /// Whether it is this pod's turn, whoever is over its due.
    fn turn(&self, act: ActionType, tenant: &Tenant<'_>) -> Result<(), Cannot> {
        if self.situation.scope == BreakerScope::Pod || tenant.over() > 0 {
            return Ok(());
        }
        let nobody_else = self.situation.when_nobody_is_over == WhenNobodyIsOver::None;
        match self.somebody_over {
            true => Err(Cannot::WithinDue),
            false if act == ActionType::Restart && nobody_else => Err(Cannot::NobodyOver),
            false => Ok(()),
        }
    }

    /// One at a time: the next only when the memory of the one before is back, or never will be.
    fn restart(&mut self, action: &Action) {
        let act = ActionType::Restart;
        let mut tried = self.situation.tried.iter().filter(|tried| tried.act == act);
        if tried.any(|tried| self.is_live(tried) || tried.outcome == Outcome::Refused) {
            // What was refused for one pod is not taken out on the next.
            let live = self.situation.tried.iter().any(|tried| tried.act == act && self.is_live(tried));
            if live {
                self.wait();
            } else {
                self.pass_over(act, None, None, WhyNot::Tried(Outcome::Refused));
            }
            return;
        }
        let candidates = self.candidates(act);
        if self.is_enough() {
            for (place, frees) in candidates {
                self.pass_over(act, Some(place), Some(frees), WhyNot::NotNeeded);
            }
            return;
        }
        if self.leaving.and_then(|place| self.tenant(place)).is_some_and(|tenant| tenant.over() > 0) {
            return self.wait();
        }
        let missing = self.situation.need.saturating_sub(self.covered);
        let chosen = cheapest(&candidates, missing).into_iter().next();
        for (place, frees) in candidates.iter().copied().filter(|(place, _)| Some(*place) != chosen) {
            self.pass_over(act, Some(place), Some(frees), WhyNot::NotNeeded);
        }
        let picked = candidates.into_iter().find(|(place, _)| Some(*place) == chosen);
        if let Some((place, frees)) = picked {
            let asked = action.restart.as_ref().is_some_and(|restart| restart.in_place);
            let agreed = self.tenant(place).is_some_and(|tenant| tenant.pod.restart_in_place);
            self.begin(act, Some(place), frees, asked && agreed);
            return self.wait();
        }
        let refused = |place: &usize| {
            self.tenant(*place).filter(|tenant| {
                let untried = self.tried(act, Some(&tenant.pod.uid)).is_none();
                tenant.over() > 0 && !tenant.pod.terminating && untried
            })
        };
        if let Some((place, tenant)) = self.order.iter().find_map(|place| Some((*place, refused(place)?))) {
            // Its incident says why nothing is done to it.
            let frees = Frees::Known(tenant.used.unwrap_or(0));
            self.begin(act, Some(place), frees, false);
        } else {
            self.no_culprit = !self.somebody_over
                && self.situation.scope != BreakerScope::Pod
                && self.situation.when_nobody_is_over == WhenNobodyIsOver::None;
        }
    }

    fn drain(&mut self) {
        let act = ActionType::Drain;
        match self.tried(act, None) {
            Some(tried) if self.is_live(tried) => self.wait(),
            Some(tried) => self.pass_over(act, None, None, WhyNot::Tried(tried.outcome)),
            None if self.is_enough() => self.pass_over(act, None, None, WhyNot::NotNeeded),
            None => {
                let used = self.situation.tenants.iter().filter(|tenant| tenant.selected);
                let used = used.fold(0u64, |sum, tenant| sum.saturating_add(tenant.used.unwrap_or(0)));
                self.begin(act, None, Frees::Known(used), false);
                self.wait();
            }
        }
    }

    fn end(mut self) -> Plan {
        self.plan.verdict = match self.leaving {
            _ if !self.is_enough() && self.no_culprit => Verdict::NoCulprit,
            _ if !self.is_enough() => Verdict::Exhausted,
            Some(place) if self.plan.begin.iter().all(|act| matches!(act.frees, Frees::Growth)) => {
                Verdict::Leaving(place)
            }
            _ => Verdict::UnderWay,
        };
        self.plan
    }
}

/// The places of the fewest candidates that together may free `missing` bytes; of several such sets
/// the one that comes first in order. All of them where all are not enough, none where none is
/// needed.
fn cheapest(candidates: &[(usize, Frees)], missing: u64) -> Vec<usize> {
    if missing == 0 {
        return Vec::new();
    }
    let amount = |(_, frees): &(usize, Frees)| frees.most();
    let largest = |of: &[(usize, Frees)], count: usize| {
        if count == 0 {
            return 0;
        }
        let mut amounts: Vec<u64> = of.iter().map(amount).collect();
        amounts.sort_unstable_by_key(|bytes| Reverse(*bytes));
        amounts.into_iter().take(count).fold(0, u64::saturating_add)
    };
    let Some(mut count) = (1..=candidates.len()).find(|count| largest(candidates, *count) >= missing) else {
        return candidates.iter().map(|(place, _)| *place).collect();
    };
    let (mut rest, mut missing, mut chosen) = (candidates, missing, Vec::with_capacity(count));
    while let Some((first, others)) = rest.split_first() {
        if count == 0 {
            break;
        }
        if amount(first).saturating_add(largest(others, count - 1)) >= missing {
            chosen.push(first.0);
            missing = missing.saturating_sub(amount(first));
            count -= 1;
        }
        rest = others;
    }
    chosen
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_set_is_the_smallest_and_of_the_smallest_the_first_in_order(
            amounts in prop::collection::vec(0u64..20, 0..9),
            missing in 0u64..60,
        ) {
            let candidates: Vec<(usize, Frees)> =
                amounts.iter().enumerate().map(|(at, bytes)| (at + 100, Frees::Known(*bytes))).collect();
            let chosen = cheapest(&candidates, missing);
            let sets = (0u32..1 << amounts.len()).map(|bits| {
                (0..amounts.len()).filter(|at| bits & 1 << at != 0).collect::<Vec<usize>>()
            });
            let enough = sets.filter(|set| set.iter().map(|at| amounts[*at]).sum::<u64>() >= missing);
            let best = enough.min_by_key(|set| (set.len(), set.clone()));
            let expected = best.unwrap_or_else(|| (0..amounts.len()).collect());
            prop_assert_eq!(chosen, expected.into_iter().map(|at| at + 100).collect::<Vec<_>>());
        }
    }
}
