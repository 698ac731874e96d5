//! What each act needs, whether it can work on a pod, and how much it should free.

use highwater_crds::{ActionType, BreakerScope, Level};

use super::{Frees, Situation, Tenant};
use crate::{park, victim};

/// Why an act cannot be done on a pod, or at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cannot {
    /// The policy does not concern its namespace.
    NotSelected,
    /// The pod did not opt in to it.
    NotOptedIn,
    /// New acts on the pod are switched off.
    Paused,
    /// The pod was asked to end already.
    Ending,
    /// What the pod uses is not known.
    UseUnknown,
    /// The pod holds nothing.
    HoldsNothing,
    /// The pod is within its due, and another is above.
    WithinDue,
    /// Nobody is over its due, and the policy lets nobody else be concerned.
    NobodyOver,
    /// It does not free memory fast enough for this level.
    TooSlow,
    /// It concerns the whole device, and the breaker is about one pod.
    WholeDevice,
    /// There is nothing to take back.
    NothingIdle,
    /// A precondition of parking does not hold.
    Park(park::Refusal),
    /// It may not be restarted.
    Restart(victim::Refusal),
}

/// How long an act that was begun is waited for before a stronger one, in milliseconds. `None`: until
/// its outcome is known.
pub const fn patience(act: ActionType) -> Option<u64> {
    match act {
        ActionType::Signal | ActionType::Hook | ActionType::Freeze | ActionType::Reclaim => Some(5_000),
        // Probes fail a few times before the pod is out, and requests under way still end.
        ActionType::Unready => Some(60_000),
        ActionType::Park => Some(120_000),
        ActionType::Restart | ActionType::Drain => None,
    }
}

/// Whether an act frees memory at once, so that it counts at Emergency. Idle grants are given back
/// by the pool itself, which only a breaker of scope `Pool` measures.
pub const fn is_at_once(act: ActionType, scope: BreakerScope) -> bool {
    match act {
        ActionType::Restart | ActionType::Drain => true,
        ActionType::Reclaim => matches!(scope, BreakerScope::Pool),
        ActionType::Signal
        | ActionType::Hook
        | ActionType::Unready
        | ActionType::Freeze
        | ActionType::Park => false,
    }
}

/// Whether an act is left out at a level.
pub(super) const fn is_too_slow(act: ActionType, level: Level) -> bool {
    matches!(level, Level::Emergency)
        && matches!(act, ActionType::Hook | ActionType::Unready | ActionType::Park)
}

/// What an act on one pod should free, or why it cannot be done there. Whether another pod must go
/// first is not asked here.
pub(super) fn on_pod(
    act: ActionType,
    situation: &Situation<'_>,
    tenant: &Tenant<'_>,
) -> Result<Frees, Cannot> {
    if !tenant.selected {
        return Err(Cannot::NotSelected);
    }
    let pod = tenant.pod;
    let opted_in = match act {
        ActionType::Signal => pod.signal_volume,
        ActionType::Hook => pod.hook.is_some(),
        ActionType::Unready => pod.unready,
        _ => true,
    };
    if !opted_in {
        return Err(Cannot::NotOptedIn);
    }
    if pod.terminating {
        return Err(Cannot::Ending);
    }
    if act == ActionType::Signal {
        // It is told even where nobody knows what it uses.
        return Ok(Frees::UpTo(tenant.used.unwrap_or(0)));
    }
    if is_too_slow(act, situation.level) {
        return Err(Cannot::TooSlow);
    }
    // The operator decides itself about a pause, and waits for its end, where it decides at all.
    if pod.paused && act != ActionType::Restart {
        return Err(Cannot::Paused);
    }
    if act == ActionType::Restart {
        tenant.restart.map_err(Cannot::Restart)?;
    }
    let used = tenant.used.ok_or(Cannot::UseUnknown)?;
    if used == 0 {
        return Err(Cannot::HoldsNothing);
    }
    match act {
        ActionType::Park => tenant.park.map(Frees::Known).map_err(Cannot::Park),
        ActionType::Restart => Ok(Frees::Known(used)),
        _ => Ok(Frees::UpTo(used)),
    }
}

/// What `Reclaim` should free on the device: idle grants where the pool is measured, and what guards
/// trim of the driver's pools. Where a guard does not say what those hold it may be all of it.
pub(super) fn reclaim(situation: &Situation<'_>) -> Result<Frees, Cannot> {
    let (mut idle, mut grants, mut trimmed, mut guarded) = (0u64, false, 0u64, false);
    for tenant in situation.tenants {
        grants |= tenant.idle_grant > 0;
        if situation.scope == BreakerScope::Pool {
            idle = idle.saturating_add(tenant.idle_grant);
        }
        if tenant.guarded && !tenant.pod.terminating {
            let cached = tenant.cached.or(tenant.used).unwrap_or(0);
            guarded |= cached > 0;
            trimmed = trimmed.saturating_add(cached);
        }
    }
    match (idle, trimmed) {
        (0, 0) if grants || guarded => Ok(Frees::UpTo(0)),
        (0, 0) => Err(Cannot::NothingIdle),
        (idle, 0) => Ok(Frees::Known(idle)),
        (idle, trimmed) => Ok(Frees::UpTo(idle.saturating_add(trimmed))),
    }
}
