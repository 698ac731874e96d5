//! A plan in words, for incidents, Events and logs.

use std::fmt::{self, Write};

use highwater_crds::{ActionType, BreakerScope, ByteSize};

use super::{Act, Alternative, Cannot, Frees, Outcome, Situation, Tenant, WhyNot};

/// The longest line in bytes (as the schema of an incident says).
const LINE: usize = 256;

impl fmt::Display for Frees {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Known(bytes) => write!(f, "frees {}", ByteSize(*bytes).rounded()),
            Self::UpTo(bytes) => write!(f, "may free up to {}", ByteSize(*bytes).rounded()),
            Self::Growth => f.write_str("stops growth"),
        }
    }
}

impl fmt::Display for Cannot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotSelected => "the policy does not concern its namespace",
            Self::NotOptedIn => "the pod did not opt in",
            Self::Paused => "new acts on the pod are paused",
            Self::Ending => "the pod is ending already",
            Self::UseUnknown => "its use is not known",
            Self::HoldsNothing => "it holds nothing",
            Self::WithinDue => "it is within its due while another is above",
            Self::NobodyOver => "nobody is over its due",
            Self::TooSlow => "too slow for an emergency",
            Self::WholeDevice => "it concerns the whole device, and the breaker one pod",
            Self::NothingIdle => "nothing is idle",
            Self::Park(refusal) => return refusal.fmt(f),
            Self::Restart(refusal) => refusal.as_str(),
        })
    }
}

impl fmt::Display for WhyNot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cannot(cannot) => cannot.fmt(f),
            Self::Tried(Outcome::Pending) => f.write_str("begun, and not enough in its time"),
            Self::Tried(Outcome::Insufficient { freed: Some(freed) }) => {
                write!(f, "done, freed {}, not enough", ByteSize(*freed).rounded())
            }
            Self::Tried(Outcome::Insufficient { freed: None }) => f.write_str("done, not enough"),
            Self::Tried(Outcome::Failed) => f.write_str("begun, and failed"),
            Self::Tried(Outcome::Refused) => f.write_str("refused before"),
            Self::NotNeeded => f.write_str("not needed unless what is begun is not enough"),
        }
    }
}

impl Alternative {
    /// One line for an incident: the act, on whom, what it might have freed, and why it was not
    /// begun.
    pub fn line(&self, tenants: &[Tenant<'_>]) -> String {
        let mut line = whom(self.action, self.tenant, tenants);
        // Writing to a string cannot fail.
        let _ = match &self.frees {
            Some(frees) => write!(line, ": {frees}, {}", self.why_not),
            None => write!(line, ": {}", self.why_not),
        };
        shortened(line)
    }
}

impl Act {
    /// Why it is begun, in a sentence with the numbers.
    pub fn line(&self, situation: &Situation<'_>) -> String {
        let mut line = whom(self.action, self.tenant, situation.tenants);
        let tenant = self.tenant.and_then(|place| situation.tenants.get(place));
        let _ = write!(line, " {} of {} that must go", self.frees, ByteSize(situation.need).rounded());
        if let Some((over, due)) = tenant.and_then(|tenant| Some((tenant.over(), tenant.due?)))
            && over > 0
        {
            let _ = write!(
                line,
                ": it is {} above its due of {}",
                ByteSize(over).rounded(),
                ByteSize(due).rounded()
            );
        } else if let Some(tenant) = tenant.filter(|_| situation.scope != BreakerScope::Pod) {
            let _ = write!(
                line,
                ": nobody is over its due, and it is first by its priority of {}",
                tenant.pod.priority
            );
        }
        shortened(line)
    }
}

fn whom(action: ActionType, tenant: Option<usize>, tenants: &[Tenant<'_>]) -> String {
    match tenant.and_then(|place| tenants.get(place)) {
        Some(tenant) => format!("{action:?} of {}/{}", tenant.pod.namespace, tenant.pod.name),
        None => format!("{action:?}"),
    }
}

/// At most as long as an incident takes, cut between characters.
fn shortened(mut line: String) -> String {
    let mut end = LINE.min(line.len());
    while !line.is_char_boundary(end) {
        end -= 1;
    }
    line.truncate(end);
    line
}
