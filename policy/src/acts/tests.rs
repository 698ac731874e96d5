use highwater_crds::{
    Action, ActionType, Breaker, BreakerPreset, BreakerScope, ByteSize, Level, RestartAction, Rise,
    RiseLevel, WhenNobodyIsOver,
};
use jiff::Timestamp;
use proptest::{collection::vec, option, prelude::*, sample::select};

use super::*;
use crate::{
    pod::{Hook, HookPreset},
    rise::Rate,
};

const GI: u64 = ByteSize::GI;

/// A pod that opted in to everything.
fn willing(uid: &str) -> PodFacts {
    PodFacts {
        namespace: "team".into(),
        name: uid.into(),
        uid: uid.into(),
        signal_volume: true,
        hook: Some(Hook { preset: HookPreset::VllmSleep, port: 8000 }),
        unready: true,
        park: true,
        restart_in_place: true,
        ..PodFacts::default()
    }
}

/// A pod that opted in to nothing.
fn plain(uid: &str) -> PodFacts {
    PodFacts { namespace: "team".into(), name: uid.into(), uid: uid.into(), ..PodFacts::default() }
}

fn tenant(pod: &PodFacts, used: u64, due: u64) -> Tenant<'_> {
    Tenant {
        pod,
        used: Some(used * GI),
        due: Some(due * GI),
        idle_grant: 0,
        guarded: false,
        cached: None,
        selected: true,
        restart: Ok(()),
        park: if pod.park { Ok(used * GI) } else { Err(park::Refusal::NotOptedIn) },
    }
}

fn actions(types: &[ActionType]) -> Vec<Action> {
    types.iter().map(|type_| Action::of(*type_)).collect()
}

/// A device that has to lose so many GiB, with these acts in force.
struct Case<'a> {
    actions: &'a [Action],
    tenants: &'a [Tenant<'a>],
    need: u64,
    level: Level,
    scope: BreakerScope,
    tried: Vec<Tried<'a>>,
    lowest: bool,
    now: u64,
}

fn case<'a>(actions: &'a [Action], tenants: &'a [Tenant<'a>], need: u64) -> Case<'a> {
    let (level, scope) = (Level::Critical, BreakerScope::Device);
    Case { actions, tenants, need, level, scope, tried: Vec::new(), lowest: false, now: 0 }
}

impl Case<'_> {
    fn plan(&self) -> Plan {
        let actions: Vec<&Action> = self.actions.iter().collect();
        plan(&Situation {
            scope: self.scope,
            level: self.level,
            actions: &actions,
            need: self.need * GI,
            tenants: self.tenants,
            tried: &self.tried,
            when_nobody_is_over: if self.lowest {
                WhenNobodyIsOver::LowestPriority
            } else {
                WhenNobodyIsOver::None
            },
            now: Millis(self.now),
            wall: Timestamp::UNIX_EPOCH,
        })
    }

    fn begun(&self) -> Vec<(ActionType, Option<usize>)> {
        self.plan().begin.iter().map(|act| (act.action, act.tenant)).collect()
    }
}

fn pending(act: ActionType, uid: Option<&str>, begun: u64) -> Tried<'_> {
    Tried { act, uid, begun: Millis(begun), outcome: Outcome::Pending }
}

fn ended(act: ActionType, uid: Option<&str>, outcome: Outcome) -> Tried<'_> {
    Tried { act, uid, begun: Millis(0), outcome }
}

const TOO_LITTLE: Outcome = Outcome::Insufficient { freed: Some(GI) };

use ActionType::{Drain, Freeze, Hook as HookAct, Park, Reclaim, Restart, Signal, Unready};

#[test]
fn each_act_that_can_be_enough_is_chosen_alone() {
    let pod = willing("a");
    let guarded = Tenant { guarded: true, cached: Some(8 * GI), ..tenant(&pod, 20, 10) };
    for (act, of) in [
        (Signal, Some(0)),
        (HookAct, Some(0)),
        (Unready, Some(0)),
        (Freeze, None),
        (Reclaim, None),
        (Park, Some(0)),
        (Restart, Some(0)),
        (Drain, None),
    ] {
        let stronger: Vec<ActionType> = ActionType::ALL
            .into_iter()
            .filter(|other| *other >= act && *other != Freeze || *other == act)
            .collect();
        let (actions, tenants) = (actions(&stronger), [guarded]);
        let case = case(&actions, &tenants, 8);
        assert_eq!(case.begun(), [(act, of)]);
        assert_eq!(case.plan().verdict, Verdict::UnderWay);
    }
}

#[test]
fn what_the_pod_did_not_opt_in_to_is_skipped_and_told() {
    let pod = plain("a");
    let actions = actions(&[Signal, HookAct, Unready, Park, Reclaim, Restart]);
    let tenants = [tenant(&pod, 20, 10)];
    let case = case(&actions, &tenants, 8);
    assert_eq!(case.begun(), [(Restart, Some(0))]);
    let lines: Vec<String> = case.plan().alternatives.iter().map(|a| a.line(&tenants)).collect();
    assert!(lines.contains(&"Hook of team/a: the pod did not opt in".to_owned()), "{lines:?}");
    assert!(lines.contains(&"Reclaim: nothing is idle".to_owned()), "{lines:?}");
    assert!(lines.len() <= MAX_ALTERNATIVES);
}

#[test]
fn the_ladder_climbs_only_when_what_was_begun_had_its_time() {
    let pod = willing("a");
    let actions = actions(&[Signal, HookAct, Freeze, Park, Restart]);
    let tenants = [tenant(&pod, 20, 10)];
    let mut case = case(&actions, &tenants, 8);
    assert_eq!(case.begun(), [(Signal, Some(0)), (Freeze, None)]);
    case.tried = vec![pending(Signal, Some("a"), 0), pending(Freeze, None, 0)];
    case.now = 4_999;
    assert_eq!((case.begun(), case.plan().verdict), (vec![], Verdict::UnderWay));
    case.now = 5_000;
    assert_eq!(case.begun(), [(HookAct, Some(0))]);
    case.tried.push(pending(HookAct, Some("a"), 5_000));
    case.now = 5_100;
    assert_eq!(case.begun(), []);
    case.tried.pop();
    case.tried.push(ended(HookAct, Some("a"), Outcome::Failed));
    assert_eq!(case.begun(), [(Park, Some(0))], "it is known to have failed");
    case.tried.push(ended(Park, Some("a"), Outcome::Refused));
    assert_eq!(case.begun(), [(Restart, Some(0))]);
    case.tried.push(pending(Restart, Some("a"), 5_100));
    case.now = 3_600_000;
    assert_eq!((case.begun(), case.plan().verdict), (vec![], Verdict::UnderWay), "its outcome is waited for");
    case.need = 0;
    assert_eq!((case.begun(), case.plan().verdict), (vec![], Verdict::Enough));
}

#[test]
fn acts_that_together_cannot_be_enough_do_not_hold_up_a_stronger_one() {
    let (small, large) = (willing("small"), plain("large"));
    let actions = actions(&[HookAct, Restart]);
    let tenants = [tenant(&small, 4, 2), tenant(&large, 40, 20)];
    assert_eq!(case(&actions, &tenants, 30).begun(), [(HookAct, Some(0)), (Restart, Some(1))]);
}

#[test]
fn at_an_emergency_only_what_frees_at_once_counts() {
    let pod = willing("a");
    let actions = actions(&[Signal, HookAct, Unready, Freeze, Park, Restart]);
    let tenants = [tenant(&pod, 20, 10)];
    let case = Case { level: Level::Emergency, ..case(&actions, &tenants, 8) };
    assert_eq!(case.begun(), [(Signal, Some(0)), (Freeze, None), (Restart, Some(0))]);
    let told: Vec<ActionType> = case.plan().alternatives.iter().map(|a| a.action).collect();
    assert_eq!(told, [HookAct, Unready, Park]);
    let begun = Case { tried: vec![pending(HookAct, Some("a"), 0)], ..case };
    assert!(begun.begun().contains(&(Restart, Some(0))), "a hook under way is not waited for");
}

#[test]
fn nobody_within_its_due_is_acted_on_while_another_is_above() {
    let (over, within) = (plain("over"), willing("within"));
    let actions = actions(&[HookAct, Unready, Park, Restart]);
    let tenants = [tenant(&within, 60, 60), tenant(&over, 12, 10)];
    let mut case = case(&actions, &tenants, 30);
    assert_eq!(case.begun(), [(Restart, Some(1))]);
    assert!(case.plan().alternatives.iter().any(|a| a.why_not == WhyNot::Cannot(Cannot::WithinDue)));
    case.tried = vec![ended(Restart, Some("over"), TOO_LITTLE)];
    assert_eq!((case.begun(), case.plan().verdict), (vec![], Verdict::Exhausted));
}

#[test]
fn a_lower_priority_goes_first_and_then_a_higher_overshoot() {
    let pods: Vec<PodFacts> = [("a", 5), ("b", 0), ("c", 0)]
        .into_iter()
        .map(|(uid, priority)| PodFacts { priority, ..plain(uid) })
        .collect();
    let actions = actions(&[Restart]);
    let tenants = [tenant(&pods[0], 30, 5), tenant(&pods[1], 20, 15), tenant(&pods[2], 20, 10)];
    assert_eq!(case(&actions, &tenants, 8).begun(), [(Restart, Some(2))]);
    assert_eq!(case(&actions, &tenants, 25).begun(), [(Restart, Some(0))], "one that is enough, not two");
    assert_eq!(case(&actions, &tenants, 65).begun(), [(Restart, Some(2))], "all are needed: one at a time");
}

#[test]
fn nobody_over_is_restarted_only_if_the_policy_says_so() {
    let pods: Vec<PodFacts> = [("a", 5), ("b", 0), ("c", 0)]
        .into_iter()
        .map(|(uid, priority)| PodFacts { priority, ..plain(uid) })
        .collect();
    let actions = actions(&[Restart]);
    let tenants = [tenant(&pods[0], 30, 30), tenant(&pods[1], 20, 20), tenant(&pods[2], 25, 30)];
    let none = case(&actions, &tenants, 8);
    assert_eq!((none.begun(), none.plan().verdict), (vec![], Verdict::NoCulprit));
    assert_eq!(Case { lowest: true, ..none }.begun(), [(Restart, Some(2))]);
    let willing = willing("w");
    let parked = [tenant(&willing, 20, 20)];
    let park = crate::acts::tests::actions(&[Park, Restart]);
    assert_eq!(case(&park, &parked, 8).begun(), [(Park, Some(0))], "it opted in");
}

#[test]
fn a_breaker_of_one_pod_acts_on_it_whatever_it_is_due() {
    let pod = plain("a");
    let actions = actions(&[Freeze, Restart]);
    let tenants = [tenant(&pod, 9, 10)];
    let case = Case { scope: BreakerScope::Pod, ..case(&actions, &tenants, 1) };
    assert_eq!(case.begun(), [(Restart, Some(0))], "a freeze of the device is not waited for");
}

#[test]
fn a_culprit_that_may_not_be_restarted_is_named_all_the_same_and_nobody_else_pays() {
    let (bare, within) = (plain("bare"), plain("within"));
    let actions = actions(&[Restart]);
    let tenants =
        [Tenant { restart: Err(victim::Refusal::NoOwner), ..tenant(&bare, 20, 10) }, tenant(&within, 9, 10)];
    let mut case = case(&actions, &tenants, 8);
    assert_eq!(case.begun(), [(Restart, Some(0))]);
    case.tried = vec![ended(Restart, Some("bare"), Outcome::Refused)];
    assert_eq!((case.begun(), case.plan().verdict), (vec![], Verdict::Exhausted));
}

#[test]
fn d13_a_pod_that_leaves_is_waited_for_unless_it_is_stuck() {
    let second = |s: i64| Some(Timestamp::from_second(s).unwrap());
    let leaving = PodFacts { terminating: true, ends_at: second(10), ..plain("leaving") };
    let stuck = PodFacts { terminating: true, ends_at: second(-40), ..plain("stuck") };
    let other = plain("other");
    let actions = actions(&[Restart]);
    let tenants = [tenant(&leaving, 12, 10), tenant(&other, 30, 20)];
    let waits = case(&actions, &tenants, 20);
    assert_eq!((waits.begun(), waits.plan().verdict), (vec![], Verdict::Leaving(0)));
    let tenants = [tenant(&stuck, 12, 10), tenant(&other, 30, 20)];
    assert_eq!(case(&actions, &tenants, 20).begun(), [(Restart, Some(1))]);
}

#[test]
fn a_refusal_ends_the_restarts_of_an_episode_and_a_failure_does_not() {
    let (a, b) = (plain("a"), plain("b"));
    let actions = actions(&[Restart]);
    let tenants = [tenant(&a, 20, 10), tenant(&b, 20, 15)];
    let with =
        |outcome| Case { tried: vec![ended(Restart, Some("a"), outcome)], ..case(&actions, &tenants, 8) };
    assert_eq!(with(Outcome::Refused).begun(), [], "a budget is not passed by naming another pod");
    assert_eq!(with(Outcome::Failed).begun(), [(Restart, Some(1))]);
    assert_eq!(with(TOO_LITTLE).begun(), [(Restart, Some(1))]);
}

#[test]
fn a_node_is_drained_last() {
    let pod = plain("a");
    let actions = actions(&[Restart, Drain]);
    let tenants = [tenant(&pod, 20, 10)];
    let mut case = case(&actions, &tenants, 8);
    assert_eq!(case.begun(), [(Restart, Some(0))]);
    case.tried = vec![ended(Restart, Some("a"), TOO_LITTLE)];
    assert_eq!(case.begun(), [(Drain, None)]);
}

#[test]
fn idle_grants_count_where_the_pool_is_measured() {
    let pod = plain("a");
    let actions = actions(&[Reclaim, Restart]);
    let tenants = [Tenant { idle_grant: 10 * GI, ..tenant(&pod, 20, 10) }];
    let of = |scope, level| Case { level, scope, ..case(&actions, &tenants, 8) }.begun();
    assert_eq!(of(BreakerScope::Pool, Level::Critical), [(Reclaim, None)]);
    assert_eq!(
        of(BreakerScope::Pool, Level::Emergency),
        [(Reclaim, None)],
        "the pool gives them back itself"
    );
    assert_eq!(of(BreakerScope::Device, Level::Critical), [(Reclaim, None), (Restart, Some(0))]);
}

#[test]
fn a_restart_is_in_place_where_both_agree() {
    let (agrees, does_not) = (willing("a"), plain("a"));
    let restart = RestartAction { grace_period_seconds: None, in_place: true };
    let asked = [Action { restart: Some(restart), ..Action::of(Restart) }];
    let in_place = |actions: &[Action], pod: &PodFacts| {
        let tenants = [tenant(pod, 20, 10)];
        case(actions, &tenants, 8).plan().begin[0].in_place
    };
    assert!(in_place(&asked, &agrees));
    assert!(!in_place(&asked, &does_not));
    assert!(!in_place(&actions(&[Restart]), &agrees));
}

#[test]
fn what_must_go_is_what_is_above_the_clear_mark_now_or_by_the_end_of_the_lead() {
    let preset = Breaker {
        scope: BreakerScope::Device,
        preset: Some(BreakerPreset::WarnBreakEmergency),
        rise: Some(Rise { level: RiseLevel::Critical, lead_seconds: 30, above_percent: 60 }),
        minimum_stay_milliseconds: 2000,
        warning: None,
        critical: None,
        emergency: None,
        when_nobody_is_over: WhenNobodyIsOver::None,
    };
    let preset = breaker::filled(&preset);
    let reading = |used: u64, rate: u64| Reading {
        share: Some(Share { used, of: 1000 }),
        rate: Some(Rate(i64::try_from(rate).unwrap())),
    };
    let at = |level| State::at(level, Millis(0));
    assert_eq!(need(&preset, &at(Level::Critical), reading(900, 0)), Some(61), "839 is below 84 %");
    assert_eq!(need(&preset, &at(Level::Critical), reading(839, 0)), Some(0));
    assert_eq!(need(&preset, &at(Level::Normal), reading(999, 0)), Some(0));
    assert_eq!(need(&preset, &at(Level::Critical), Reading::default()), None);
    let mut early = at(Level::Critical);
    early.early = true;
    assert_eq!(need(&preset, &early, reading(650, 10)), Some(950 - 839));
    assert_eq!(need(&preset, &early, reading(650, 1000)), Some(1000 - 839));
    assert_eq!(
        in_force(&preset, Level::Critical).iter().map(|a| a.type_).collect::<Vec<_>>(),
        [Signal, HookAct, Freeze, Reclaim]
    );
}

fn any_pod(uid: usize) -> impl Strategy<Value = PodFacts> {
    (0..3i32, any::<[bool; 4]>(), any::<bool>(), select(vec![-100i64, 10])).prop_map(
        move |(priority, [signal, hook, unready, park], terminating, ends)| PodFacts {
            priority,
            terminating: terminating && uid.is_multiple_of(4),
            ends_at: Some(Timestamp::from_second(ends).unwrap()),
            signal_volume: signal,
            unready,
            park,
            hook: hook.then_some(Hook { preset: HookPreset::VllmSleep, port: 1 }),
            ..plain(&uid.to_string())
        },
    )
}

fn any_pods() -> impl Strategy<Value = Vec<PodFacts>> {
    (0usize..7).prop_flat_map(|count| (0..count).map(any_pod).collect::<Vec<_>>())
}

proptest! {
    #[test]
    fn a_plan_is_sparing_just_and_comes_to_an_end(
        pods in any_pods(),
        uses in vec((option::of(0u64..40), option::of(0u64..30), any::<bool>(), any::<bool>()), 7),
        types in vec(select(ActionType::ALL.to_vec()), 0..8),
        need in 1u64..80,
        level in select(vec![Level::Warning, Level::Critical, Level::Emergency]),
        scope in select(vec![BreakerScope::Device, BreakerScope::Pool]),
        lowest in any::<bool>(),
        outcomes in vec(select(vec![Outcome::Pending, TOO_LITTLE, Outcome::Failed, Outcome::Refused]), 64),
    ) {
        let mut types = types;
        types.sort_unstable();
        types.dedup();
        let actions = actions(&types);
        let tenants: Vec<Tenant<'_>> = pods.iter().zip(&uses).map(|(pod, (used, due, may, selected))| Tenant {
            used: used.map(|u| u * GI),
            due: due.map(|d| d * GI),
            restart: if *may { Ok(()) } else { Err(victim::Refusal::NoOwner) },
            selected: *selected,
            ..tenant(pod, used.unwrap_or(0), 0)
        }).collect();
        let mut case = Case { level, scope, lowest, ..case(&actions, &tenants, need) };
        let mut outcomes = outcomes.into_iter();
        let mut restarts = 0;
        for round in 0.. {
            prop_assert!(round < 100, "it never comes to an end");
            let plan = case.plan();
            prop_assert_eq!(&plan, &case.plan(), "the same situation has the same plan");
            prop_assert!(plan.alternatives.len() <= MAX_ALTERNATIVES);
            prop_assert!(plan.begin.iter().filter(|act| act.action == Restart).count() <= 1);
            let somebody_over = tenants.iter().any(|t| {
                t.over() > 0 && (!t.pod.terminating || t.is_leaving(Timestamp::UNIX_EPOCH))
            });
            for act in &plan.begin {
                prop_assert!(types.contains(&act.action));
                let uid = act.tenant.map(|place| tenants[place].pod.uid.as_str());
                prop_assert!(!case.tried.iter().any(|t| t.act == act.action && t.uid == uid), "once an episode");
                if let Some(tenant) = act.tenant.map(|place| &tenants[place])
                    && act.action != Signal
                {
                    prop_assert!(!somebody_over || tenant.over() > 0, "within its due while another is above");
                    prop_assert!(!tenant.pod.terminating && tenant.used.is_some());
                    prop_assert!(somebody_over || lowest || act.action != Restart, "nobody is to blame");
                }
                let slow = matches!(act.action, HookAct | Unready | Park);
                prop_assert!(level != Level::Emergency || !slow);
            }
            // Of what is done to several pods at once, none could be left out.
            for type_ in [HookAct, Unready, Park] {
                let of: Vec<u64> =
                    plan.begin.iter().filter(|a| a.action == type_).map(|a| a.frees.most()).collect();
                if plan.begin.iter().all(|a| a.action <= type_) && plan.verdict == Verdict::UnderWay {
                    let all: u64 = of.iter().sum();
                    prop_assert!(of.iter().all(|one| all - one < need * GI), "one was not needed");
                }
            }
            restarts += plan.begin.iter().filter(|act| act.action == Restart).count();
            if plan.begin.is_empty() {
                // Whatever is still waited for has its time, or an outcome.
                let Some(waiting) = case.tried.iter_mut().find(|t| t.outcome == Outcome::Pending) else { break };
                waiting.outcome = TOO_LITTLE;
                case.now += 1;
                continue;
            }
            for act in plan.begin {
                let uid = act.tenant.map(|place| tenants[place].pod.uid.as_str());
                let outcome = outcomes.next().unwrap_or(Outcome::Failed);
                case.tried.push(Tried { act: act.action, uid, begun: Millis(case.now), outcome });
                let situation = Situation {
                    scope,
                    level,
                    actions: &[],
                    need,
                    tenants: &tenants,
                    tried: &[],
                    when_nobody_is_over: WhenNobodyIsOver::None,
                    now: Millis(0),
                    wall: Timestamp::UNIX_EPOCH,
                };
                prop_assert!(!act.line(&situation).is_empty());
            }
        }
        prop_assert!(restarts <= tenants.len());
    }

    /// An agent that is killed forgets what it did by itself; what the operator allowed is in the
    /// incidents that it finds.
    #[test]
    fn an_agent_that_forgets_at_any_step_never_asks_twice_for_what_is_budgeted(
        pods in any_pods(),
        uses in vec((1u64..40, 1u64..30), 7),
        types in vec(select(ActionType::ALL.to_vec()), 1..8),
        need in 1u64..80,
        killed in vec(any::<bool>(), 60),
        outcomes in vec(select(vec![Outcome::Pending, TOO_LITTLE, Outcome::Failed, Outcome::Refused]), 60),
    ) {
        let actions = actions(&types);
        let tenants: Vec<Tenant<'_>> =
            pods.iter().zip(&uses).map(|(pod, (used, due))| tenant(pod, *used, *due)).collect();
        let mut case = Case { lowest: true, ..case(&actions, &tenants, need) };
        let mut asked: Vec<(ActionType, Option<usize>)> = Vec::new();
        for (killed, outcome) in killed.into_iter().zip(outcomes) {
            for act in case.plan().begin {
                if act.action.is_budgeted() {
                    prop_assert!(!asked.contains(&(act.action, act.tenant)), "{:?} twice", act.action);
                    asked.push((act.action, act.tenant));
                }
                let uid = act.tenant.map(|place| tenants[place].pod.uid.as_str());
                case.tried.push(Tried { act: act.action, uid, begun: Millis(case.now), outcome });
            }
            if killed {
                case.tried.retain(|tried| tried.act.is_budgeted());
            }
            case.now += 1_000;
        }
    }
}
