//! What can go wrong while reconciling.

use std::time::Duration;

use highwater_policy::budget::LedgerError;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("failed to {what}: {source}")]
    Api {
        what: &'static str,
        #[source]
        source: Box<kube::Error>,
    },
    #[error("failed to {what}: no answer within {seconds} s")]
    Timeout { what: &'static str, seconds: u64 },
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error("another leader has moved on; looking again")]
    Overtaken,
    #[error("not the leader")]
    NotLeader,
    #[error("the release is being uninstalled")]
    Uninstalling,
}

impl Error {
    /// A label for metrics, of few values.
    pub(crate) fn category(&self) -> &'static str {
        match self {
            Self::Api { source, .. } => match code(source) {
                Some(403) => "forbidden",
                Some(404) => "not_found",
                Some(409) => "conflict",
                Some(422) => "invalid",
                Some(429) => "throttled",
                Some(_) => "api",
                None => "connection",
            },
            Self::Timeout { .. } => "timeout",
            Self::Ledger(_) => "ledger",
            Self::Overtaken => "overtaken",
            Self::NotLeader => "not_leader",
            Self::Uninstalling => "uninstalling",
        }
    }

    /// How long the API server is left alone after it said that it has no time for this.
    pub(crate) fn leaves_alone(&self) -> Option<Duration> {
        let Self::Api { source, .. } = self else { return None };
        let kube::Error::Api(status) = source.as_ref() else { return None };
        let seconds = status.details.as_ref().map_or(0, |details| details.retry_after_seconds);
        (status.code == 429).then(|| Duration::from_secs(seconds.clamp(1, 60).into()))
    }

    /// Part of ordinary life: nothing is wrong.
    pub(crate) fn is_ordinary(&self) -> bool {
        matches!(self, Self::Overtaken | Self::NotLeader | Self::Uninstalling)
            || matches!(self, Self::Api { source, .. } if matches!(code(source), Some(404 | 409)))
    }
}

/// The HTTP status of an answer of the API server.
pub(crate) fn code(error: &kube::Error) -> Option<u16> {
    match error {
        kube::Error::Api(status) => Some(status.code),
        _ => None,
    }
}

/// Waits at most this long for any one answer of the API server.
pub(crate) const CALL_SECONDS: u64 = 10;

/// Makes a call to the API server with a bound on its time and a name for its failure.
pub(crate) async fn call<T>(
    what: &'static str,
    request: impl Future<Output = kube::Result<T>> + Send,
) -> Result<T, Error> {
    match tokio::time::timeout(Duration::from_secs(CALL_SECONDS), request).await {
        Ok(answer) => answer.map_err(|source| Error::Api { what, source: Box::new(source) }),
        Err(_) => Err(Error::Timeout { what, seconds: CALL_SECONDS }),
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_server_that_has_no_time_is_left_alone_for_as_long_as_it_asks() {
        let answered = |code: u16, seconds: Option<u32>| {
            let status: Status = serde_json::from_value(json!({"code": code, "message": "",
                "details": seconds.map(|s| json!({"retryAfterSeconds": s}))}))
            .unwrap();
            let source = Box::new(kube::Error::Api(Box::new(status)));
            Error::Api { what: "read", source }.leaves_alone().map(|wait| wait.as_secs())
        };
        assert_eq!(answered(429, Some(7)), Some(7));
        assert_eq!(answered(429, None), Some(1), "of a queue that is full there is no more than the code");
        assert_eq!(answered(429, Some(86_400)), Some(60));
        assert_eq!(answered(500, Some(7)), None);
        assert_eq!(Error::Overtaken.leaves_alone(), None);
    }
}
