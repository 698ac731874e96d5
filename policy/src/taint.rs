//! Whether a node ought to be tainted, from its plan and from what its agent reports.

use highwater_crds::{DeviceFault, Freeze, GpuMemoryNodeSpec, GpuMemoryNodeStatus, Level};

use jiff::SignedDuration;

use crate::resolve::may_freeze;

/// What to do about our taint on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaintChange {
    /// Set it, with this level as its value.
    Set(Level),
    /// Take it away.
    Remove,
}

/// How long a node may be without a Ready agent before what its agent last asked for is void.
/// Longer than an agent takes to be replaced.
pub const AGENT_GONE: SignedDuration = SignedDuration::from_secs(60);

/// What to do, where `present` is the value of our taint on the node now. While acts are paused
/// nothing is set, but what need not be there still goes. `agent_away` is how long the node has
/// had no Ready agent: nobody vouches then for what it last asked, so that nothing is set, and
/// after [`AGENT_GONE`] the taint goes.
pub fn change(
    present: Option<&str>,
    desired: Option<Level>,
    paused: bool,
    agent_away: Option<SignedDuration>,
) -> Option<TaintChange> {
    let desired = desired.filter(|_| agent_away.is_none_or(|away| away < AGENT_GONE));
    let paused = paused || agent_away.is_some();
    match (present, desired) {
        (None, None) => None,
        (Some(_), None) => Some(TaintChange::Remove),
        (value, Some(level)) if value == Some(value_of(level)) || paused => None,
        (_, Some(level)) => Some(TaintChange::Set(level)),
    }
}

/// The level for the node's taint, or None where nothing asks for one: one device whose policy
/// says `AnyDevice`, or every device that works. What the agent last reported counts only as long
/// as the plan still has a breaker that may freeze that device.
pub fn desired(plan: &GpuMemoryNodeSpec, status: &GpuMemoryNodeStatus) -> Option<Level> {
    let asks: Vec<(Option<Freeze>, Level)> = status
        .devices
        .iter()
        .filter(|d| d.fault != Some(DeviceFault::Lost))
        .map(|device| {
            let model = usize::try_from(device.model).ok().and_then(|i| status.models.get(i));
            let freeze =
                device.freeze.filter(|_| model.is_some_and(|m| may_freeze(plan, &m.product, m.partition)));
            (freeze, device.level)
        })
        .collect();
    let wanted = asks.iter().any(|(freeze, _)| *freeze == Some(Freeze::AnyDevice))
        || asks.iter().all(|(freeze, _)| freeze.is_some());
    let highest = asks.iter().filter(|(freeze, _)| freeze.is_some()).map(|(_, level)| *level).max();
    highest.filter(|_| wanted)
}

/// The value of the taint for a level.
pub fn value_of(level: Level) -> &'static str {
    match level {
        Level::Normal => "Normal",
        Level::Warning => "Warning",
        Level::Critical => "Critical",
        Level::Emergency => "Emergency",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn plan(mode: &str) -> GpuMemoryNodeSpec {
        serde_json::from_value(json!({"layers": [{"mode": mode, "rules": [{
            "product": "G", "partition": "Whole", "breakers": [{"policy": "p", "ownerKinds": [],
                "value": {"scope": "Device", "critical": {"tripPercent": 88, "clearPercent": 84,
                    "actions": [{"type": "Freeze"}]}}}]}]}]}))
        .unwrap()
    }

    fn status(devices: &[(Option<&str>, Option<&str>)]) -> GpuMemoryNodeStatus {
        let devices: Vec<Value> = devices
            .iter()
            .map(|(freeze, fault)| {
                json!({"uuid": "u", "model": 0, "level": if freeze.is_some() { "Critical" } else { "Normal" },
                       "headroom": "Full", "strength": "Observe", "pods": 1, "freeze": freeze, "fault": fault})
            })
            .collect();
        serde_json::from_value(
            json!({"models": [{"product": "G", "partition": "Whole"}], "devices": devices}),
        )
        .unwrap()
    }

    #[test]
    fn one_device_is_enough_only_where_the_policy_says_so() {
        let enforced = plan("Enforce");
        assert_eq!(
            desired(&enforced, &status(&[(Some("AnyDevice"), None), (None, None)])),
            Some(Level::Critical)
        );
        assert_eq!(desired(&enforced, &status(&[(Some("AllDevices"), None), (None, None)])), None);
        let both = status(&[(Some("AllDevices"), None), (Some("AllDevices"), None)]);
        assert_eq!(desired(&enforced, &both), Some(Level::Critical));
        assert_eq!(desired(&enforced, &status(&[])), None);
    }

    #[test]
    fn a_lost_device_does_not_keep_the_others_from_freezing() {
        let state = status(&[(Some("AllDevices"), None), (None, Some("Lost"))]);
        assert_eq!(desired(&plan("Enforce"), &state), Some(Level::Critical));
    }

    #[test]
    fn without_an_enforced_breaker_a_stale_report_asks_for_nothing() {
        let state = status(&[(Some("AnyDevice"), None)]);
        assert_eq!(desired(&plan("DryRun"), &state), None);
        assert_eq!(desired(&GpuMemoryNodeSpec::default(), &state), None);
    }

    #[test]
    fn paused_sets_nothing_and_still_removes() {
        assert_eq!(change(None, Some(Level::Critical), true, None), None);
        assert_eq!(change(Some("Critical"), Some(Level::Emergency), true, None), None);
        assert_eq!(change(Some("Critical"), None, true, None), Some(TaintChange::Remove));
        assert_eq!(change(Some("Critical"), Some(Level::Critical), false, None), None);
        assert_eq!(change(None, Some(Level::Critical), false, None), Some(TaintChange::Set(Level::Critical)));
    }

    #[test]
    fn without_an_agent_nothing_is_set_and_what_is_set_goes_after_a_while() {
        let away = |seconds| Some(SignedDuration::from_secs(seconds));
        assert_eq!(change(None, Some(Level::Critical), false, away(1)), None);
        assert_eq!(change(Some("Critical"), Some(Level::Critical), false, away(59)), None);
        assert_eq!(
            change(Some("Critical"), Some(Level::Critical), false, away(60)),
            Some(TaintChange::Remove)
        );
        assert_eq!(change(None, Some(Level::Critical), false, away(60)), None);
    }
}
