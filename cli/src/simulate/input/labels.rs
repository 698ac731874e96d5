//! Labels: those that name pod and device, and those that the pod has itself.

use std::{borrow::Cow, collections::BTreeMap};

use super::lines::Fields;

/// What a file calls pod and device, and which labels of pods are of use.
#[derive(Clone, Debug, Default)]
pub(crate) struct Labels {
    /// What a person says names the pod.
    pub(crate) pod: Option<String>,
    /// What a person says names the device.
    pub(crate) device: Option<String>,
    /// The labels of pods that somebody will ask for.
    pub(crate) asked: Vec<String>,
}

/// Labels of a pod, as far as a file gives them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum PodLabels<'a> {
    /// It gives none.
    #[default]
    None,
    /// By the columns that they stand in.
    Columns(&'a [(String, usize)], Fields<'a>),
    /// By the labels of the series, where Prometheus lets them keep their names, or not.
    Metric(&'a BTreeMap<String, String>),
}

impl PodLabels<'_> {
    /// The value of a label; `None` where the file does not say, which is not that there is none.
    pub(crate) fn get(self, key: &str) -> Option<String> {
        match self {
            Self::None => None,
            Self::Columns(columns, fields) => {
                let (_, at) = columns.iter().find(|(name, _)| name == key)?;
                Some(String::from_utf8_lossy(fields.get(*at)).into_owned())
            }
            Self::Metric(labels) => {
                let plain = as_prometheus(key);
                // A series has labels of its own, as of the target that it was scraped from.
                let names =
                    [format!("label_{plain}").into(), Cow::Borrowed(key), Cow::Borrowed(plain.as_str())];
                names.iter().find_map(|name| labels.get(name.as_ref())).cloned()
            }
        }
    }
}

/// A label's name as exporters write it.
fn as_prometheus(key: &str) -> String {
    key.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_that_was_joined_from_the_pod_goes_before_one_of_the_scrape() {
        let labels = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        let both = labels(&[("app", "exporter"), ("label_app", "server")]);
        assert_eq!(PodLabels::Metric(&both).get("app").as_deref(), Some("server"));
        let plain = labels(&[("app", "server"), ("app_kubernetes_io_name", "chat")]);
        assert_eq!(PodLabels::Metric(&plain).get("app").as_deref(), Some("server"));
        assert_eq!(PodLabels::Metric(&plain).get("app.kubernetes.io/name").as_deref(), Some("chat"));
        assert_eq!(PodLabels::Metric(&plain).get("tier"), None);
    }
}
