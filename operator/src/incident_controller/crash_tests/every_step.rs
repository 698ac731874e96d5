//! Every act, each of its calls, and everything that can go wrong there.

use std::collections::BTreeSet;

use highwater_policy::remediation::may_follow;

use super::*;

/// Plays an act with one thing going wrong at each of its calls in turn, and hands every end to
/// `check` beside what is asserted of any. How many calls there were.
pub(super) async fn at_every_call(cluster: &Cluster, fault: Fault, check: impl Fn(&Cluster, &str)) -> usize {
    let mut call = 0;
    loop {
        call += 1;
        let cluster = cluster.with(|cluster| cluster.fault = Some((call, fault)));
        let story = format!(
            "{} {:?} {:?}, {fault:?} at call {call}, news at once: {}, DRA: {}",
            cluster.proposed, cluster.agent, cluster.turn, cluster.news_at_once, cluster.dra
        );
        let (mut end, struck) = play(cluster).await;
        end.fault = None;
        assert_sound(&end, &story);
        check(&end, &story);
        if !struck {
            return call - 1;
        }
    }
}

/// What becomes of an act that nobody but the fault disturbs.
fn assert_outcome(cluster: &Cluster, story: &str) {
    let decision = &cluster.objects[INCIDENT]["status"]["decision"];
    let by_nobody = ["Signal", "Hook", "Freeze", "Reclaim"].map(Value::from);
    let nothing = by_nobody.contains(&cluster.proposed["action"]);
    let expected = if nothing { DecisionState::Suppressed } else { DecisionState::Succeeded };
    assert_eq!(cluster.decision(), Some(expected), "{story}: {decision:#}");
    if nothing {
        return;
    }
    let evicted: &[&str] = match cluster.proposed["action"].as_str().unwrap() {
        "Drain" => &["a", "b", "c"],
        "Restart" if cluster.proposed["inPlace"] != json!(true) => &["a"],
        _ => &[],
    };
    assert_eq!(cluster.evictions, evicted, "{story}");
    assert_eq!(cluster.tokens().len(), evicted.len().max(1) + usize::from(evicted.len() > 1), "{story}");
    if evicted.len() > 1 {
        assert_eq!(decision["targets"], json!(["n2"]), "{story}");
    }
}

#[tokio::test]
async fn every_act_is_done_once_whatever_goes_wrong_at_whichever_call() {
    for story in stories() {
        for news_at_once in [true, false] {
            let cluster = story.with(|cluster| cluster.news_at_once = news_at_once);
            for fault in Fault::ALL {
                let calls = at_every_call(&cluster, fault, assert_outcome).await;
                assert!(calls >= 1, "{} makes no call", story.proposed);
            }
        }
    }
}

#[tokio::test]
async fn whatever_the_agent_makes_of_an_act_it_is_said_once_whenever_the_operator_dies() {
    for story in stories() {
        for agent in [Agent::Refuses, Agent::Fails, Agent::TakesBack] {
            let cluster = story.with(|cluster| cluster.agent = agent);
            at_every_call(&cluster, Fault::DiesAfter, |_, _| {}).await;
        }
    }
}

/// Of the states that may follow each other, all but those that only time, or another incident, leads to
/// are come by.
#[tokio::test]
async fn whatever_somebody_does_after_whichever_write_nothing_is_left_behind() {
    let mut followed = BTreeSet::new();
    for base in stories() {
        for turn in Turn::ALL {
            for (news_at_once, waits_first) in [(true, false), (false, false), (true, true)] {
                let mut write = 0;
                loop {
                    write += 1;
                    let cluster = base.with(|cluster| {
                        cluster.turn = Some((write, turn));
                        cluster.news_at_once = news_at_once;
                        if waits_first {
                            cluster.pause(1);
                        }
                    });
                    let story = format!(
                        "{}, {turn:?} after write {write}, news at once: {news_at_once}, waits first: {waits_first}, DRA: {}",
                        base.proposed, base.dra
                    );
                    let (mut end, _) = play(cluster).await;
                    assert_sound(&end, &story);
                    followed.append(&mut end.followed);
                    if end.turn.is_some() {
                        break;
                    }
                }
            }
        }
    }
    let (open, all) = (states().into_iter().filter(|state| !state.is_final()), states());
    for from in open.map(Some).chain([None]) {
        for to in all.iter().copied().filter(|to| may_follow(from, *to) && from != Some(*to)) {
            let by_time = to == DecisionState::Failed && from != Some(DecisionState::Verifying);
            let by_another = to == DecisionState::Superseded;
            // Its answer was lost, and then it had to wait.
            let by_chance = (from, to) == (Some(DecisionState::Proposed), DecisionState::Verifying);
            let seen = followed.contains(&(from, to));
            assert!(seen || by_time || by_another || by_chance, "never {from:?} -> {to:?}");
        }
    }
}

/// The same, with a death at every call of the acts that go by several writes.
#[tokio::test]
async fn whatever_somebody_does_in_the_middle_of_an_act_and_whenever_the_operator_dies_then() {
    for proposed in [json!({"action": "Restart"}), json!({"action": "Park"}), json!({"action": "Drain"})] {
        let turns = [
            Turn::PolicyDeleted,
            Turn::Paused,
            Turn::IncidentDeleted,
            Turn::IncidentEmptied,
            Turn::Uncordoned,
            Turn::CordonedAnew,
        ];
        for turn in turns {
            for write in 1..=4 {
                let cluster = Cluster::new(&proposed).with(|cluster| cluster.turn = Some((write, turn)));
                at_every_call(&cluster, Fault::DiesAfter, |_, _| {}).await;
            }
        }
    }
}
