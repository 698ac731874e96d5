//! What a policy's quota lets a pod come to.

use std::collections::BTreeSet;

use highwater_crds::{PlanQuota, QuotaRule};
use highwater_policy::{
    pod::{self, Labels, NamespaceFacts, PodFacts},
    quota::effective,
};

use super::input::PodLabels;

/// A namespace that the policy concerns: which one a recording is of decides nothing here.
const SELECTED: &str = "recorded";
/// One that is none of the recording's.
const RELEASE: &str = "highwater-system";

/// The quota of a policy.
#[derive(Clone, Debug)]
pub(crate) struct Quota(PlanQuota);

/// What a pod may have, in bytes; `None` where no rule gives it a limit.
pub(crate) type Limit = Option<u64>;

impl Quota {
    /// Of a policy of this name.
    pub(crate) fn new(policy: &str, value: highwater_crds::Quota) -> Self {
        Self(PlanQuota { policy: policy.to_owned(), namespaces: None, owner_kinds: Vec::new(), value })
    }

    /// The labels that its rules ask for.
    pub(crate) fn keys(&self) -> BTreeSet<&str> {
        self.0.value.rules.iter().flat_map(keys).collect()
    }

    /// What a pod may have, by what is known of its labels: what the recording gives, else what was
    /// given for all pods. Fails with the label that would have to be known.
    pub(crate) fn limit(&self, recorded: PodLabels<'_>, given: &Labels) -> Result<Limit, String> {
        let mut labels = Labels::new();
        for rule in &self.0.value.rules {
            for key in keys(rule) {
                let value = recorded.get(key).or_else(|| given.get(key).cloned());
                let value = value.ok_or_else(|| key.to_owned())?;
                // A pod without the label, as far as a file can say so.
                if !value.is_empty() {
                    labels.insert(key.to_owned(), value);
                }
            }
            if pod::selects(&rule.pods, &labels) {
                break;
            }
        }
        let pod = PodFacts { namespace: SELECTED.to_owned(), labels, ..PodFacts::default() };
        let found = effective([&self.0], &pod, Some(&NamespaceFacts::default()), RELEASE, None);
        Ok(found.map(|quota| quota.limit))
    }
}

fn keys(rule: &QuotaRule) -> impl Iterator<Item = &str> {
    let labels = rule.pods.match_labels.iter().flat_map(|labels| labels.keys());
    let expressions = rule.pods.match_expressions.iter().flatten().map(|expression| &expression.key);
    labels.chain(expressions).map(String::as_str)
}

/// A label of all pods, as `KEY=VALUE`.
pub(crate) fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("write KEY=VALUE, such as tier=serving".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use highwater_crds::ByteSize;
    use serde_json::json;

    use super::*;

    fn quota(value: serde_json::Value) -> Quota {
        Quota::new("p", serde_json::from_value(value).unwrap())
    }

    fn limit(quota: &Quota, metric: &[(&str, &str)], given: &[(&str, &str)]) -> Result<Limit, String> {
        let map = |of: &[(&str, &str)]| -> BTreeMap<String, String> {
            of.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        quota.limit(PodLabels::Metric(&map(metric)), &map(given)).map(|limit| limit.map(|l| l / ByteSize::GI))
    }

    #[test]
    fn the_first_rule_that_matches_holds_else_the_default() {
        let quota = quota(json!({
            "default": {"limit": "8Gi"},
            "rules": [
                {"name": "serving", "pods": {"matchLabels": {"tier": "serving"}}, "limit": "40Gi"},
                {"name": "batch", "limit": "20Gi", "pods": {"matchExpressions": [
                    {"key": "app.kubernetes.io/name", "operator": "In", "values": ["train", "tune"]}]}},
            ],
        }));
        assert_eq!(quota.keys().into_iter().collect::<Vec<_>>(), ["app.kubernetes.io/name", "tier"]);
        assert_eq!(limit(&quota, &[("tier", "serving")], &[]), Ok(Some(40)));
        let name = "label_app_kubernetes_io_name";
        assert_eq!(limit(&quota, &[("label_tier", "other"), (name, "tune")], &[]), Ok(Some(20)));
        assert_eq!(limit(&quota, &[("tier", ""), (name, "x")], &[]), Ok(Some(8)));
        assert_eq!(limit(&quota, &[], &[("tier", "serving")]), Ok(Some(40)));
        assert_eq!(
            limit(&quota, &[("tier", "x")], &[("tier", "serving")]),
            Err("app.kubernetes.io/name".into())
        );
        assert_eq!(limit(&quota, &[], &[]), Err("tier".into()), "dropped, or never recorded: nobody can say");
    }

    #[test]
    fn a_rule_that_asks_for_no_label_needs_none() {
        let everybody = quota(json!({"rules": [{"name": "all", "pods": {}, "limit": "8Gi"}]}));
        assert_eq!(limit(&everybody, &[], &[]), Ok(Some(8)));
        assert_eq!(limit(&quota(json!({"default": {"limit": "4Gi"}})), &[], &[]), Ok(Some(4)));
        assert_eq!(limit(&quota(json!({})), &[], &[]), Ok(None));
    }

    #[test]
    fn a_label_is_a_key_and_a_value() {
        assert_eq!(label("tier=a=b"), Ok(("tier".into(), "a=b".into())));
        assert_eq!(label("tier="), Ok(("tier".into(), String::new())));
        assert!(label("tier").is_err() && label("=x").is_err());
    }
}
