//! The policy that is replayed.

use std::{fs, path::Path, sync::Arc};

use highwater_crds::{
    Action, Breaker, BreakerScope, GpuMemoryPolicy, GpuMemoryPolicySpec, Mode, Watermark, WhenNobodyIsOver,
};
use highwater_policy::leak::Settings;
use kube::CustomResourceExt;
use serde_json::Value;

use super::{input::Fault, quota::Quota, schema};

/// What of a policy can be replayed over memory alone.
#[derive(Clone, Debug)]
pub(crate) struct Policy {
    /// Leak detection.
    pub(crate) settings: Arc<Settings>,
    /// The watermarks of a device; `None` where the policy has none.
    pub(crate) breaker: Option<Breaker>,
    /// What it lets pods have; `None` where it says nothing of that.
    pub(crate) quota: Option<Quota>,
    /// What is to be said of it.
    pub(crate) notes: Vec<String>,
}

impl Default for Policy {
    /// The documented marks of 75, 88 and 95 percent.
    fn default() -> Self {
        let mark = |trip_percent, clear_percent, hold_milliseconds| {
            Some(Watermark { trip_percent, clear_percent, hold_milliseconds, actions: Vec::new() })
        };
        Self {
            settings: Arc::default(),
            breaker: Some(Breaker {
                scope: BreakerScope::Device,
                preset: None,
                rise: None,
                minimum_stay_milliseconds: 2000,
                warning: mark(75, 72, 500),
                critical: mark(88, 84, 500),
                emergency: mark(95, 90, 0),
                when_nobody_is_over: WhenNobodyIsOver::None,
            }),
            quota: None,
            notes: Vec::new(),
        }
    }
}

impl Policy {
    /// Reads a file that holds one GpuMemoryPolicy, among whatever else.
    pub(crate) fn open(path: &Path) -> Result<Self, Fault> {
        let text =
            fs::read_to_string(path).map_err(|error| Fault::of_file(format!("cannot be read: {error}")))?;
        Self::parse(&text)
    }

    fn parse(text: &str) -> Result<Self, Fault> {
        let documents: Vec<Value> = serde_saphyr::from_multiple(text).map_err(|error| unreadable(&error))?;
        let mut policies =
            documents.into_iter().filter(|d| d.get("kind").is_some_and(|k| k == "GpuMemoryPolicy"));
        let value = policies
            .next()
            .ok_or_else(|| Fault::of_file("holds no GpuMemoryPolicy: name a file that does"))?;
        if policies.next().is_some() {
            return Err(Fault::of_file("holds several GpuMemoryPolicies: keep the one to be replayed"));
        }
        let definition = serde_json::to_value(GpuMemoryPolicy::crd()).unwrap_or_default();
        if let Some(fault) = schema::fault(&value, &definition) {
            return Err(Fault::of_file(fault));
        }
        let policy: GpuMemoryPolicy = serde_json::from_value(value)
            .map_err(|error| Fault::of_file(format!("is no GpuMemoryPolicy: {error}")))?;
        let mut notes = Vec::new();
        let settings = match &policy.spec.leaks {
            None => {
                notes.push("the policy says nothing of leaks: the defaults are replayed".to_owned());
                Settings::default()
            }
            Some(leaks) => {
                Settings::of(leaks).map_err(|what| Fault::of_file(format!("spec.leaks.{what}")))?
            }
        };
        let breaker = policy
            .spec
            .breakers
            .iter()
            .find(|breaker| breaker.scope == BreakerScope::Device)
            .map(highwater_policy::breaker::filled);
        match &breaker {
            Some(breaker) => {
                check(breaker).map_err(|what| Fault::of_file(format!("spec.breakers: {what}")))?;
            }
            None => {
                notes.push("the policy has no breaker of the scope Device: no marks are replayed".to_owned());
            }
        }
        notes.extend(restraint(&policy.spec, breaker.as_ref()));
        let name = policy.metadata.name.unwrap_or_default();
        let quota = policy.spec.quota.map(|quota| Quota::new(&name, quota));
        Ok(Self { settings: Arc::new(settings), breaker, quota, notes })
    }
}

/// What is wrong with a text that is no YAML, in which line.
fn unreadable(error: &serde_saphyr::Error) -> Fault {
    let (plain, line) = (error.without_snippet(), error.location().map(|location| location.line()));
    let what = match plain {
        serde_saphyr::Error::DuplicateMappingKey { key: Some(key), .. } => {
            format!("the field {key} is there twice: keep one")
        }
        serde_saphyr::Error::DuplicateMappingKey { key: None, .. } => {
            "a field is there twice: keep one".to_owned()
        }
        _ => return Fault::of_file(format!("is not YAML: {error}")),
    };
    Fault { line, what }
}

/// What a policy would have done and, by its mode, did not; `None` where it acts.
fn restraint(spec: &GpuMemoryPolicySpec, breaker: Option<&Breaker>) -> Option<String> {
    let does = match spec.mode {
        Mode::Observe => "Observe: it measures, opens no incident and does nothing",
        Mode::DryRun => "DryRun: it opens incidents and does nothing",
        Mode::Enforce => return None,
    };
    let of = |mark: fn(&Breaker) -> &Option<Watermark>| {
        breaker.and_then(|breaker| mark(breaker).as_ref()).map_or(&[][..], |mark| &mark.actions)
    };
    let leaks = spec.leaks.as_ref().map_or(&[][..], |leaks| &leaks.actions);
    let acts: Vec<String> = [
        ("act", leaks),
        ("warning", of(|breaker| &breaker.warning)),
        ("critical", of(|breaker| &breaker.critical)),
        ("emergency", of(|breaker| &breaker.emergency)),
    ]
    .into_iter()
    .filter(|(_, actions)| !actions.is_empty())
    .map(|(when, actions)| format!("at {when} {}", names(actions)))
    .collect();
    let would = if acts.is_empty() {
        "nothing either, since it names no actions".to_owned()
    } else {
        acts.join("; ")
    };
    Some(format!("the policy is in mode {does}. In mode Enforce it would have done: {would}"))
}

fn names(actions: &[Action]) -> String {
    actions.iter().map(|action| format!("{:?}", action.type_)).collect::<Vec<_>>().join(", ")
}

/// What the API server would refuse of a breaker, and what would make a replay mean nothing.
fn check(breaker: &Breaker) -> Result<(), String> {
    let marks =
        [("warning", &breaker.warning), ("critical", &breaker.critical), ("emergency", &breaker.emergency)];
    let marks: Vec<(&str, &Watermark)> =
        marks.into_iter().filter_map(|(name, mark)| mark.as_ref().map(|mark| (name, mark))).collect();
    if marks.is_empty() {
        return Err("give at least one of warning, critical and emergency".to_owned());
    }
    for (name, mark) in &marks {
        if !(1..=100).contains(&mark.trip_percent) {
            return Err(format!("{name}.tripPercent is {}: write 1 to 100", mark.trip_percent));
        }
        if mark.clear_percent < 0 || mark.clear_percent >= mark.trip_percent {
            return Err(format!(
                "{name}.clearPercent is {}: it has to be at least 0 and below tripPercent, {}",
                mark.clear_percent, mark.trip_percent
            ));
        }
    }
    for ((lower_name, lower), (name, mark)) in marks.iter().zip(marks.iter().skip(1)) {
        if lower.trip_percent >= mark.trip_percent || lower.clear_percent > mark.clear_percent {
            return Err(format!(
                "levels are out of order: {lower_name} has to trip below {name}, and to clear no higher"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(spec: &str) -> Result<Policy, String> {
        let mode = if spec.contains("mode:") { "" } else { "\n  mode: Enforce" };
        let text = format!(
            "apiVersion: v1\nkind: ConfigMap\n---\napiVersion: highwater.dev/v1alpha1\nkind: GpuMemoryPolicy\n\
             metadata: {{name: a}}\nspec:\n  nodes: {{}}{mode}\n  {spec}\n"
        );
        Policy::parse(&text).map_err(|fault| fault.to_string())
    }

    #[test]
    fn what_a_policy_says_of_leaks_stands_over_the_defaults() {
        let found = policy("leaks: {horizonMilliseconds: 1800000, actAbovePercent: 60}").unwrap();
        let expected =
            Settings { horizon_milliseconds: 1_800_000, act_above_percent: 60, ..Settings::default() };
        assert_eq!(*found.settings, expected);
        assert_eq!(found.breaker, None);
        assert_eq!(found.notes, ["the policy has no breaker of the scope Device: no marks are replayed"]);
    }

    #[test]
    fn a_policy_without_leaks_is_replayed_with_the_defaults_and_says_so() {
        let found =
            policy("breakers: [{scope: Device, warning: {tripPercent: 60, clearPercent: 50}}]").unwrap();
        assert_eq!(*found.settings, Settings::default());
        assert_eq!(found.breaker.unwrap().warning.unwrap().hold_milliseconds, 500);
        assert_eq!(found.notes, ["the policy says nothing of leaks: the defaults are replayed"]);
    }

    #[test]
    fn what_cannot_be_replayed_is_named() {
        for (spec, expected) in [
            ("leaks: {horizonMinutes: 3}", "spec.leaks.horizonMinutes is no field"),
            ("leaks: {horizonMilliseconds: 1h}", "spec.leaks.horizonMilliseconds is \"1h\": write 3600000"),
            (
                "leaks: {minimumGrowthSize: 256MB}",
                "spec.leaks.minimumGrowthSize: \"256MB\" is not a quantity",
            ),
            (
                "leaks: {bucketMilliseconds: 45000}",
                "spec.leaks.bucketMilliseconds is 45000: it does not divide",
            ),
            (
                "leaks:\n    leadMilliseconds: 60000\n    leadMilliseconds: 1000",
                "line 12: the field leadMilliseconds is there twice: keep one",
            ),
            ("leaks: {actAbovePercent: 101}", "spec.leaks.actAbovePercent is 101"),
            ("leaks: 5", "spec.leaks is 5: write"),
            ("quota: {default: {limit: 0}}", "spec.quota.default.limit is 0: write"),
            ("breaker: []", "spec.breaker is no field"),
            ("breakers: [{scope: Device, warning: {trip: 60}}]", "spec.breakers[0].warning.trip is no field"),
            ("breakers: [{scope: Device}]", "spec.breakers: give at least one"),
            (
                "breakers: [{scope: Device, warning: {tripPercent: 160, clearPercent: 5}}]",
                "spec.breakers[0].warning.tripPercent is 160: write",
            ),
            (
                "breakers: [{scope: Device, warning: {tripPercent: 60, clearPercent: 60}}]",
                "spec.breakers: warning.clear",
            ),
            (
                "breakers: [{scope: Device, warning: {tripPercent: 60, clearPercent: 5}, emergency: {tripPercent: 50, clearPercent: 6}}]",
                "spec.breakers: levels are out of order: warning has to trip below emergency",
            ),
            ("mode: Kill", "spec.mode is \"Kill\": write Observe, DryRun or Enforce"),
        ] {
            let error = policy(spec).unwrap_err();
            assert!(error.starts_with(expected), "{spec}: {error}");
        }
    }

    #[test]
    fn a_policy_that_does_nothing_says_so_and_what_it_would_do() {
        let note = |spec: &str| policy(spec).unwrap().notes.pop().unwrap();
        assert_eq!(
            note("mode: Observe\n  leaks: {actions: [{type: Signal}, {type: Restart}]}"),
            "the policy is in mode Observe: it measures, opens no incident and does nothing. In mode Enforce it \
             would have done: at act Signal, Restart"
        );
        let breaker = "breakers: [{scope: Device, preset: ReclaimRefuse}]";
        let dry = note(&format!("mode: DryRun\n  {breaker}"));
        assert!(
            dry.contains("mode DryRun") && dry.contains("at warning Signal, Reclaim; at critical "),
            "{dry}"
        );
        assert!(note("mode: Observe\n  leaks: {}").ends_with("nothing either, since it names no actions"));
        assert!(!note("mode: Enforce\n  leaks: {}").contains("mode"));
        // Absent, it is Observe.
        let text = "kind: GpuMemoryPolicy\nmetadata: {name: a}\nspec: {nodes: {}}\n";
        assert!(Policy::parse(text).unwrap().notes.pop().unwrap().contains("mode Observe"));
    }

    #[test]
    fn there_has_to_be_one_policy() {
        let one = "kind: GpuMemoryPolicy\nmetadata: {name: a}\nspec: {nodes: {}}\n";
        assert!(
            Policy::parse("kind: Pod\n").unwrap_err().to_string().starts_with("holds no GpuMemoryPolicy")
        );
        let error = Policy::parse(&format!("{one}---\n{one}")).unwrap_err().to_string();
        assert!(error.starts_with("holds several"), "{error}");
        assert!(Policy::parse("a: [").unwrap_err().to_string().starts_with("is not YAML"));
        assert!(Policy::parse("").is_err());
    }

    #[test]
    fn the_marks_that_hold_without_a_policy_are_good() {
        assert_eq!(check(&Policy::default().breaker.unwrap()), Ok(()));
    }
}
