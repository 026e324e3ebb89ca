//! Sandboxes that were made before anyone asked for them.

use std::{fs, path::PathBuf};

use rustix::process::{kill_process, Pid, Signal};
use serde_json::{json, Value};

use crate::bench::{has_ended, noded, until, Noded};

/// Directories of warm sandboxes, and how many noded says there are.
fn warm(node: &Noded) -> (Vec<PathBuf>, u64) {
    let entries = fs::read_dir(node.dir.path().join("sandboxes")).unwrap().flatten().map(|entry| entry.path());
    let dirs = entries.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("warm-")).collect();
    (dirs, node.call("GET", "/v1/health", &Value::Null).1["warm"].as_u64().unwrap())
}

/// Asks for the same often enough to have some ready.
fn habit(node: &Noded, more: &Value) {
    for _ in 0..4 {
        node.delete(&node.create(more.clone()));
    }
    until("some are ready", || (warm(node).1 >= 2).then_some(()));
}

/// Host pids of the daemons of warm sandboxes. (A claimed one keeps its group, and the name of it.)
fn pids(node: &Noded) -> Vec<i32> {
    let names: Vec<_> = warm(node).0.iter().map(|dir| dir.file_name().unwrap().to_owned()).collect();
    let groups = node.groups().into_iter().filter(|path| names.contains(&path.file_name().unwrap().to_owned()));
    let procs = groups.filter_map(|path| fs::read_to_string(path.join("cgroup.procs")).ok());
    procs.flat_map(|text| text.lines().map(|line| line.parse().unwrap()).collect::<Vec<i32>>()).collect()
}

/// All that a process can see of how it is confined, but for numbers that differ: descriptors, ids on the host.
const LOOK: &str = "id; hostname; env | sort; cat /etc/hostname /etc/hosts /etc/resolv.conf; ulimit -a; \
    grep -E '^(Cap|Seccomp|NoNewPrivs|Sig)' /proc/self/status; cat /proc/self/uid_map | tr -s ' ' | cut -d' ' -f2,4; \
    awk '{print $5, $6, $9, $10}' /proc/self/mountinfo | sed 's/[0-9][0-9]*//g'; ls -la / /etc/hosts | tail -n +2 | awk '{print $1, $3, $4, $9}'; \
    cat /proc/1/comm; ls /proc/self/fd; ip -o addr 2>/dev/null; pwd; touch /x /usr/x && ls /x /usr/x";

#[test]
fn a_claimed_one_is_like_any_other() {
    let more = json!({
        "env": {"A": "1"}, "workdir": "/work/here", "user": "user",
        "limits": {"memory_bytes": 256 << 20, "pids": 100, "cpu": 0.5}
    });
    let Some(cold) = noded(&["--max-warm", "0"]) else { return };
    let Some(node) = noded(&[]) else { return };
    let root = json!({"limits": more["limits"]});
    habit(&node, &root);
    let before = warm(&node).1;
    for spec in [&more, &root] {
        let (made, claimed) = (cold.create(spec.clone()), node.create(spec.clone()));
        assert_eq!(node.sh(&claimed, LOOK).0, cold.sh(&made, LOOK).0);
        let (made, claimed) = (cold.info(&made), node.info(&claimed));
        for same in ["image", "limits", "network", "env", "workdir", "user", "state"] {
            assert_eq!(made[same], claimed[same]);
        }
        let (created, started) = (claimed["created_at"].as_f64().unwrap(), claimed["started_at"].as_f64().unwrap());
        assert!(started >= created - 0.001 && claimed["expires_at"].as_f64().unwrap() > started + 290.0, "{claimed}");
    }
    let list = node.call("GET", "/v1/sandboxes", &Value::Null).1;
    assert_eq!(list["sandboxes"].as_array().unwrap().len(), 2, "nobody sees those that wait");
    assert!(before >= 2, "both were claimed");
}

#[test]
fn they_end_with_noded_whatever_ends_it() {
    let Some(mut node) = noded(&[]) else { return };
    habit(&node, &json!({}));
    let stays = node.create(json!({}));
    until("some are ready", || (warm(&node).1 >= 2).then_some(()));
    let waiting = pids(&node);
    assert!(waiting.len() >= 2, "{waiting:?}");
    node.stop(Signal::KILL);
    for pid in waiting {
        until("it ends by itself", || has_ended(pid));
    }
    node.restart(Signal::KILL);
    assert_eq!(warm(&node), (vec![], 0));
    assert!(pids(&node).is_empty());
    assert_eq!(node.sh(&stays, "echo here").0, "here");
    habit(&node, &json!({}));
    let waiting = pids(&node);
    let groups = node.groups();
    node.stop(Signal::TERM);
    assert!(fs::read_dir(node.dir.path().join("sandboxes")).unwrap().next().is_none());
    assert!(groups.iter().all(|group| !group.exists()));
    assert!(waiting.iter().all(|pid| has_ended(*pid).is_some()));
    node.restart(Signal::KILL);
}

#[test]
fn a_dead_one_is_given_to_nobody() {
    let Some(node) = noded(&[]) else { return };
    habit(&node, &json!({}));
    for pid in pids(&node) {
        let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL); // one that was still being made may be gone by now
        until("it is dead", || has_ended(pid));
    }
    let id = node.create(json!({}));
    assert_eq!(node.sh(&id, "echo fine").0, "fine");
    node.delete(&id);
}

#[test]
fn other_limits_or_a_network_are_not_served_from_it() {
    let Some(node) = noded(&[]) else { return };
    habit(&node, &json!({}));
    let id = node.create(json!({"limits": {"pids": 77}}));
    assert_eq!(node.info(&id)["limits"]["pids"], 77);
    assert_eq!(node.sh(&id, "cat /sys/fs/cgroup/pids.max").0, "77");
    let named = node.create(json!({"hostname": "box-7"}));
    assert_eq!(node.sh(&named, "hostname; cat /etc/hostname").0, "box-7\nbox-7");
    // An image may go although some wait that were made from it: they go first.
    let image = node.info(&id)["image"].clone();
    let path = format!("/v1/images/{}", image.as_str().unwrap().replace(':', "%3A"));
    node.call("DELETE", &path, &Value::Null);
    assert_eq!(warm(&node), (vec![], 0));
}
