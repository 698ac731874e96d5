//! Nothing flaps, however load swings around marks.

use std::time::Duration;

use anyhow::{Result, ensure};
use highwater_e2e::eventually;
use highwater_scenarios::{NODE, PRESSURE_FILE, Scenario, broken_by, scenario};
use serde_json::{Value, json};

/// One swing, there and back.
const SWING: Duration = Duration::from_millis(600);

/// How long load swings in all: 30 s, or what `FLAP_SECONDS` says. The acceptance is 600.
fn seconds() -> u64 {
    std::env::var("FLAP_SECONDS").ok().and_then(|seconds| seconds.parse().ok()).unwrap_or(30)
}

#[test]
fn load_that_swings_around_each_mark_enters_and_leaves_each_level_once() -> Result<()> {
    scenario("flaps", async |s| {
        let mark = |trip: i32, actions: Value| json!({"tripPercent": trip, "clearPercent": trip - 4, "holdMilliseconds": 100, "actions": actions});
        let (signal, reclaim) = (json!({"type": "Signal"}), json!({"type": "Reclaim"}));
        let freeze = json!({"type": "Freeze", "freeze": {"taintNodeWhen": "AnyDevice"}});
        let breaker = json!({"scope": "Device", "minimumStayMilliseconds": 500,
            "warning": mark(40, json!([signal])),
            "critical": mark(50, json!([signal, reclaim])),
            "emergency": mark(60, json!([signal, reclaim, freeze])),
        });
        s.program(&s.namespace, broken_by(&s.namespace, "75Gi", &breaker)).await?;
        // One percent of a device is 813 MiB. Up: 39 to 41, 49 to 51, 59 to 61; down, around the marks
        // where levels end: 55 to 57, 45 to 47, 35 to 37.
        let times = (Duration::from_secs(seconds()).as_millis() / SWING.as_millis() / 6).max(2);
        let swing = format!("swing 1640Mi every 300ms x{times}");
        let script = format!(
            "watch-pressure {PRESSURE_FILE}; context; hold 1s; alloc 27929Mi; alloc 3243Mi; {swing}; \
             alloc 4887Mi; alloc 3243Mi; {swing}; alloc 4888Mi; alloc 3242Mi; {swing}; \
             free 3242Mi; {swing}; free 8131Mi; {swing}; free 8130Mi; {swing}; free; hold 1s; serve"
        );
        let pod = s.start("swings", &script).await?;
        let device = s.device_of(&pod).await?;
        let limit = Duration::from_secs(2 * seconds() + 60);
        let mut levels = Vec::new();
        let name = kube::ResourceExt::name_any(&pod);
        eventually("the end of the swinging", limit, async || {
            let labels = [("device", device.as_str()), ("mode", "Enforce")];
            if let Some(level) = s.metrics(NODE).await?.bytes("highwater_device_level", &labels)?
                && levels.last() != Some(&level)
            {
                levels.push(level);
            }
            let tail = s.cluster.logs(&s.namespace, &name, None, 3).await?;
            ensure!(tail.contains(" serve used="), "it swings; the levels so far are {levels:?}");
            Ok(())
        })
        .await?;
        ensure!(levels == [0, 1, 2, 3, 2, 1, 0], "the levels were {levels:?}");
        told(s, &pod).await?;
        s.tainted(NODE, false).await?;
        let incidents = s.incidents_of(&s.namespace).await?;
        ensure!(incidents.is_empty(), "{} incidents about load that swings", incidents.len());
        s.untouched(&pod).await
    })
}

/// The pod was told of each change once.
async fn told(s: &Scenario, pod: &k8s_openapi::api::core::v1::Pod) -> Result<()> {
    let log = s.log(pod).await?;
    let mut told: Vec<&str> = Vec::new();
    for line in &log {
        let level = ["Normal", "Warning", "Critical", "Emergency"]
            .into_iter()
            .find(|level| line.text.contains(&format!("\"level\":\"{level}\"")));
        if let Some(level) = level.filter(|level| told.last() != Some(level)) {
            told.push(level);
        }
    }
    if told.first() == Some(&"Normal") {
        told.remove(0);
    }
    ensure!(
        told == ["Warning", "Critical", "Emergency", "Critical", "Warning", "Normal"],
        "the pressure file said {told:?}"
    );
    Ok(())
}
