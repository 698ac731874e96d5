//! What an agent begins within one episode of a leak: the hook before a restart, and the next incident
//! where one was closed and nothing was done.
//!
//! **The hook.** What it frees is seen in what the pod holds, long before the detector, which looks at
//! half an hour, thinks otherwise of the pod. So the agent says beside the finding whether a hook comes
//! first and what is seen since, and the operator waits for that: see [`crate::leak_acts`].
//!
//! **The next incident.** An incident that is closed without an act says nothing of the leak, only of
//! what was against the act then: a policy, a webhook, a pause of the node. As long as the pod leaks on,
//! it is proposed again, later each time. Of an episode at most one act is ever begun: what was begun,
//! or may have been, is never proposed again.

use highwater_crds::{
    ActReport, ActState, ActionType, Decision, GpuMemoryIncident, HookAction, HookEffect, HookReport,
    IncidentKind, Leaks,
};
use jiff::SignedDuration;

use crate::{episode, leak::Settings, remediation::TICKET_NEEDED, time::Millis};

/// The next incident is opened a horizon divided by this after the first was closed, and each time
/// after twice as long,
const FIRST_PART: u64 = 12;
/// up to so many horizons.
const MOST_HORIZONS: u64 = 4;
/// However short a horizon is: at least so long, in milliseconds,
const FIRST_AT_LEAST: u64 = 30_000;
/// and at most no less than this.
const MOST_AT_LEAST: u64 = 3_600_000;

/// So many samples of the rule show what a hook has freed,
const SAMPLES: u64 = 3;
/// and at least so many milliseconds.
const EFFECT_AT_LEAST: u64 = 5_000;

/// Reasons that do not pass while the pod lives, or that ended a rehearsal.
const LASTING: [&str; 6] =
    ["DryRun", TICKET_NEEDED, "MirrorPod", "SystemPriority", "DaemonSetPod", "NoOwner"];

/// Whether an incident about a leak was closed, its episode goes on, and nothing was done because of it.
/// `reported` is what the agent itself knows of its act.
pub fn is_undone(incident: &GpuMemoryIncident, reported: Option<&ActReport>) -> bool {
    let status = incident.status.as_ref();
    let stored = status.and_then(|s| s.observation.as_ref()?.act.as_ref());
    let begun = |report: &ActReport| report.state != ActState::Refused;
    incident.spec.kind == IncidentKind::Leak
        && episode::is_closed(incident)
        && !episode::has_ended(incident)
        && decision(incident).is_none_or(|decision| decision.acted_at.is_none())
        && !reported.is_some_and(begun)
        && !stored.is_some_and(begun)
}

/// How long after an incident was closed the next one of its episode may be opened, in milliseconds.
/// `None`: never, since something was done, or what was against it stays. `undone` counts the incidents
/// of the episode that were closed without an act, this one included.
pub fn again_after(
    incident: &GpuMemoryIncident,
    reported: Option<&ActReport>,
    undone: usize,
    horizon: SignedDuration,
) -> Option<u64> {
    let decision = decision(incident).filter(|_| is_undone(incident, reported))?;
    if LASTING.contains(&decision.reason.as_str()) {
        return None;
    }
    let horizon = u64::try_from(horizon.as_millis()).unwrap_or(0);
    let first = (horizon / FIRST_PART).max(FIRST_AT_LEAST);
    let most = horizon.saturating_mul(MOST_HORIZONS).max(MOST_AT_LEAST);
    let doubled = u32::try_from(undone.saturating_sub(1)).unwrap_or(u32::MAX).min(32);
    Some(first.saturating_mul(1 << doubled).min(most))
}

fn decision(incident: &GpuMemoryIncident) -> Option<&Decision> {
    incident.status.as_ref()?.decision.as_ref()
}

/// The hook that comes before a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hook {
    effect: HookEffect,
    /// Bytes that the pod held when its engine was asked. None: it is still to be.
    held: Option<u64>,
    /// When it was asked, or was last heard to have been.
    since: Millis,
}

impl Hook {
    /// One that is to be asked.
    pub const fn due() -> Self {
        Self { effect: HookEffect::Awaited, held: None, since: Millis(0) }
    }

    /// One of which an earlier agent told.
    pub fn resumed(told: &HookReport, now: Millis) -> Self {
        let held = told.held_bytes.and_then(|bytes| u64::try_from(bytes).ok());
        Self { effect: told.effect, held, since: now }
    }

    /// What is to be told of it.
    pub fn report(&self) -> HookReport {
        let held_bytes = self.held.map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX));
        HookReport { effect: self.effect, held_bytes }
    }

    /// Whether its effect is still to come.
    pub fn is_awaited(&self) -> bool {
        self.effect == HookEffect::Awaited
    }

    /// Whether the engine is still to be asked.
    pub fn is_to_be_asked(&self) -> bool {
        self.is_awaited() && self.held.is_none()
    }

    /// The engine is asked, while the pod holds so much.
    pub fn ask(&mut self, held: u64, now: Millis) {
        (self.held, self.since) = (Some(held), now);
    }

    /// The engine could not be asked, or did not do it.
    pub fn fail(&mut self) {
        if self.is_awaited() {
            self.effect = HookEffect::InVain;
        }
    }

    /// The pod was sampled. Where nobody knows what it holds nothing is concluded.
    pub fn see(&mut self, used: Option<u64>, leaks: &Leaks, now: Millis) {
        let Some((held, used)) = self.held.zip(used) else { return };
        let frees = used.saturating_add(worth(leaks, held)) <= held;
        self.effect = match self.effect {
            HookEffect::InVain => HookEffect::InVain,
            _ if frees => HookEffect::Helped,
            HookEffect::Helped => HookEffect::InVain,
            HookEffect::Awaited if now.since(self.since) >= effect_within(leaks) => HookEffect::InVain,
            HookEffect::Awaited => HookEffect::Awaited,
        };
    }
}

/// The least that is worth a wait: growth by less would be worth no word either.
fn worth(leaks: &Leaks, held: u64) -> u64 {
    let settings = Settings::of(leaks).unwrap_or_default();
    let share = held / 100 * u64::from(settings.minimum_growth_percent);
    share.max(settings.minimum_growth_bytes)
}

/// How long the effect of a hook is waited for, in milliseconds.
fn effect_within(leaks: &Leaks) -> u64 {
    let action = leaks.actions.iter().find(|action| action.type_ == ActionType::Hook);
    let limit = action.and_then(|action| action.hook.as_ref());
    let limit = limit.map_or(HookAction::DEFAULT_TIMEOUT_MILLISECONDS, |hook| hook.timeout_milliseconds);
    let sample = Settings::of(leaks).unwrap_or_default().sample_milliseconds;
    let shows = sample.saturating_mul(SAMPLES).max(EFFECT_AT_LEAST);
    shows.saturating_add(u64::try_from(limit).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use highwater_crds::{ByteSize, DecisionState};
    use proptest::{collection::vec, prelude::*};
    use serde_json::{Value, json};

    use super::*;

    const GI: u64 = ByteSize::GI;
    const HOUR: SignedDuration = SignedDuration::from_hours(1);

    fn incident(decision: &Value, observation: &Value) -> GpuMemoryIncident {
        serde_json::from_value(json!({
            "apiVersion": "highwater.dev/v1alpha1", "kind": "GpuMemoryIncident", "metadata": {"name": "i"},
            "spec": {"kind": "Leak", "mode": "Enforce", "policy": "p", "node": "n1", "device": "GPU-1",
                "episode": 1, "subject": {"namespace": "team", "name": "a", "uid": "a"},
                "evidence": {"at": "2026-01-01T00:00:00.000000Z"}, "proposed": {"action": "Restart"}},
            "status": {"decision": decision, "observation": observation},
        }))
        .unwrap()
    }

    fn closed(state: &str, reason: &str) -> GpuMemoryIncident {
        let decision = json!({"state": state, "reason": reason, "since": "2026-01-01T00:01:00.000000Z"});
        incident(&decision, &Value::Null)
    }

    fn after(incident: &GpuMemoryIncident, undone: usize) -> Option<u64> {
        again_after(incident, None, undone, HOUR)
    }

    #[test]
    fn what_was_not_done_is_proposed_again_ever_more_seldom() {
        for (state, reason) in [
            ("Suppressed", "OwnerKindNotListed"),
            ("Suppressed", "NamespaceNotSelected"),
            ("Failed", "EvictionRefused"),
            ("Failed", "NotBegun"),
            ("Cancelled", "ActRefused"),
            ("Superseded", "SubjectBeingRestarted"),
        ] {
            let minutes = (1..9).map(|undone| after(&closed(state, reason), undone).unwrap() / 60_000);
            assert_eq!(minutes.collect::<Vec<_>>(), [5, 10, 20, 40, 80, 160, 240, 240], "{reason}");
        }
        let short = SignedDuration::from_secs(4);
        let seconds =
            |undone| again_after(&closed("Failed", "EvictionRefused"), None, undone, short).unwrap() / 1000;
        assert_eq!([1, 2, 8, 99].map(seconds), [30, 60, 3600, 3600], "a short horizon floods nobody");
    }

    #[test]
    fn what_stays_as_it_is_and_what_goes_on_is_not_proposed_again() {
        for reason in LASTING {
            assert_eq!(after(&closed("Suppressed", reason), 1), None, "{reason}");
        }
        for (state, reason) in
            [("Proposed", "LeakSuspected"), ("Approved", "WithinBudget"), ("Verifying", "Evicted")]
        {
            assert_eq!(after(&closed(state, reason), 1), None, "it is not closed: {reason}");
        }
        let over = json!({"state": "Recovered", "at": "2026-01-01T00:02:00.000000Z"});
        let decision =
            json!({"state": "Failed", "reason": "EvictionRefused", "since": "2026-01-01T00:01:00.000000Z"});
        assert_eq!(after(&incident(&decision, &over), 1), None, "its episode is over");
    }

    proptest! {
        /// Whatever was decided and whoever reports what: an episode in which an act was begun, or may
        /// have been, has no second incident.
        #[test]
        fn never_a_second_act_for_one_episode(
            state in prop::sample::select(DecisionState::ALL.to_vec()), acted in any::<bool>(),
            told in prop::option::of(prop::sample::select(vec!["Refused", "Begun", "Done", "Failed", "Undone"])),
            stored in any::<bool>(), undone in 0..40usize,
        ) {
            let mut decision = json!({"state": state, "reason": "X", "since": "2026-01-01T00:01:00.000000Z"});
            if acted {
                decision["actedAt"] = json!("2026-01-01T00:01:00.000000Z");
            }
            let report = told.map(|state| json!({"state": state}));
            let mut observation = json!({"state": "Over", "at": "2026-01-01T00:00:30.000000Z"});
            if let (Some(report), true) = (&report, stored) {
                observation["act"] = report.clone();
            }
            let own: Option<ActReport> = report.filter(|_| !stored).map(|r| serde_json::from_value(r).unwrap());
            let again = again_after(&incident(&decision, &observation), own.as_ref(), undone, HOUR);
            let begun = acted || told.is_some_and(|told| told != "Refused");
            prop_assert_eq!(again.is_some(), state.is_final() && !begun);
        }
    }

    fn leaks() -> Leaks {
        serde_json::from_value(json!({"actions": [{"type": "Hook"}, {"type": "Restart"}]})).unwrap()
    }

    fn asked() -> Hook {
        let mut hook = Hook::due();
        hook.ask(40 * GI, Millis(1000));
        hook
    }

    fn seen(hook: &mut Hook, used: u64, second: u64) -> HookEffect {
        hook.see(Some(used), &leaks(), Millis(1000 + second * 1000));
        hook.report().effect
    }

    #[test]
    fn a_hook_has_its_time_and_is_in_vain_where_nothing_went() {
        use HookEffect::{Awaited, InVain};
        let mut hook = Hook::due();
        hook.see(Some(0), &leaks(), Millis(99_000_000));
        assert!(hook.is_to_be_asked() && hook.is_awaited(), "it was not asked yet");
        let mut hook = asked();
        assert!(!hook.is_to_be_asked());
        assert_eq!(seen(&mut hook, 41 * GI, 31), Awaited, "2 s to answer, and three samples");
        hook.see(None, &leaks(), Millis(99_000_000));
        assert_eq!(hook.report().effect, Awaited, "nobody knows what it holds");
        assert_eq!(seen(&mut hook, 40 * GI - GI / 8, 32), InVain);
        assert_eq!(seen(&mut hook, GI, 33), InVain, "it is asked once");
        let mut hook = asked();
        hook.fail();
        assert_eq!(hook.report(), HookReport { effect: InVain, held_bytes: Some(40 << 30) });
    }

    #[test]
    fn what_it_freed_counts_until_it_is_in_use_again_whichever_agent_looks() {
        use HookEffect::{Helped, InVain};
        let mut hook = asked();
        assert_eq!(seen(&mut hook, 30 * GI, 1), Helped, "at once");
        hook.fail();
        assert_eq!(seen(&mut hook, 39 * GI, 9000), Helped);
        let mut hook = Hook::resumed(&hook.report(), Millis(5));
        assert_eq!(seen(&mut hook, 39 * GI, 9001), Helped);
        assert_eq!(seen(&mut hook, 40 * GI, 9002), InVain);
    }

    proptest! {
        /// A hook that was in vain stays so, and one is in vain only when its time is over or use rose.
        #[test]
        fn a_hook_ends_once(uses in vec((0..60u64, 1..20u64), 1..20)) {
            let (mut hook, mut second, mut helped) = (asked(), 0, false);
            for (used, wait) in uses {
                second += wait;
                let before = hook.report().effect;
                let effect = seen(&mut hook, used * GI, second);
                prop_assert!(before != HookEffect::InVain || effect == HookEffect::InVain);
                prop_assert!(effect != HookEffect::InVain || helped || second >= 32);
                prop_assert_eq!(effect == HookEffect::Helped, used < 40 && before != HookEffect::InVain);
                helped |= effect == HookEffect::Helped;
            }
        }
    }
}
