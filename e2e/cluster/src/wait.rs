//! Awaiting conditions, with the last observation in the error.

use std::{fmt::Display, time::Duration};

use anyhow::{Result, anyhow};
use tokio::time::{Instant, sleep, timeout_at};

/// How long to pause between two looks.
const INTERVAL: Duration = Duration::from_millis(50);

/// Looks again and again until `check` is `Ok`, at most for `limit`; its value.
///
/// The error tells what was awaited and what the last look saw.
///
/// ```no_run
/// # async fn example(cluster: highwater_e2e::Cluster) -> anyhow::Result<()> {
/// use std::time::Duration;
/// highwater_e2e::eventually("the API server", Duration::from_secs(10), async || {
///     cluster.get_raw("readyz").await
/// })
/// .await?;
/// # Ok(())
/// # }
/// ```
pub async fn eventually<T, E: Display>(
    what: &str,
    limit: Duration,
    mut check: impl AsyncFnMut() -> Result<T, E>,
) -> Result<T> {
    let deadline = Instant::now() + limit;
    let mut last = String::from("no look came to an end");
    loop {
        match timeout_at(deadline, check()).await {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(error)) => last = format!("{error:#}"),
            Err(_) => {}
        }
        if Instant::now() >= deadline {
            return Err(anyhow!("waited {limit:?} for {what}; last seen: {last}"));
        }
        sleep(INTERVAL.min(deadline - Instant::now())).await;
    }
}

/// The opposite: fails as soon as `check` is `Ok` within `span`, with the value that it saw.
///
/// For what must not happen; keep the span as short as the claim allows.
pub async fn never<T: std::fmt::Debug, E>(
    what: &str,
    span: Duration,
    mut check: impl AsyncFnMut() -> Result<T, E>,
) -> Result<()> {
    let deadline = Instant::now() + span;
    while Instant::now() < deadline {
        if let Ok(Ok(seen)) = timeout_at(deadline, check()).await {
            return Err(anyhow!("{what} must not happen, but did: {seen:?}"));
        }
        sleep(INTERVAL).await;
    }
    Ok(())
}

/// Runs `future` on a runtime of this thread (for tests of this crate).
#[cfg(test)]
fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_observation_is_in_the_error() {
        let mut looks = 0;
        let error = run(eventually("rain", Duration::from_millis(120), async || {
            looks += 1;
            Err::<(), _>(format!("look {looks}: dry"))
        }))
        .unwrap_err();
        let text = error.to_string();
        assert!(text.contains("rain") && text.contains(": dry"), "{text}");
    }

    #[test]
    fn a_look_that_hangs_does_not_hang_the_wait() {
        let error = run(eventually("an answer", Duration::from_millis(20), async || {
            std::future::pending::<Result<(), String>>().await
        }))
        .unwrap_err();
        assert!(error.to_string().contains("no look came to an end"));
    }

    #[test]
    fn what_must_not_happen_fails_at_once_with_what_was_seen() {
        let error =
            run(never("rain", Duration::from_mins(1), async || Ok::<_, String>("drops"))).unwrap_err();
        assert!(error.to_string().contains("drops"));
    }
}
