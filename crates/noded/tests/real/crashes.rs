use std::fs;

use rustix::process::Signal;
use serde_json::{json, Value};

use crate::bench::{has_ended, noded, until};

#[test]
fn sandboxes_survive_a_killed_noded() {
    let Some(mut node) = noded(&[]) else { return };
    let id = node.create(json!({"limits": {"memory_bytes": 128 << 20}}));
    node.sh(&id, "echo 42 > /tmp/answer; sleep 1000 & echo");
    let before = node.info(&id);
    node.restart(Signal::KILL);
    let after = node.info(&id);
    assert_eq!(before["pid"], after["pid"]);
    assert_eq!(node.sh(&id, "cat /tmp/answer; cat /proc/[0-9]*/comm | grep -c sleep").0, "42\n1");
    // Ends are noticed although it is no child of this noded.
    let pid = rustix::process::Pid::from_raw(after["pid"].as_i64().unwrap() as i32).unwrap();
    rustix::process::kill_process(pid, Signal::KILL).unwrap();
    let gone = until("its end is noticed", || {
        let (status, gone) = node.call("GET", &format!("/v1/sandboxes/{id}"), &Value::Null);
        (status == 410).then_some(gone)
    });
    assert_eq!(gone["details"]["cause"], "crashed");
    assert_eq!(gone["details"]["exit_status"], Value::Null, "nobody could see it");
}

#[test]
fn half_done_work_is_finished() {
    let Some(mut node) = noded(&[]) else { return };
    let (stays, dies, half) = (node.create(json!({})), node.create(json!({})), node.create(json!({})));
    let dir = |id: &str| node.dir.path().join("sandboxes").join(id);
    let pids: Vec<u64> = [&dies, &half].iter().map(|id| node.info(id)["pid"].as_u64().unwrap()).collect();
    fs::rename(dir(&dies).join("state.json"), dir(&dies).join("ending-lease_expired.json")).unwrap();
    fs::write(dir(&half).join("state.json"), "{\"boot_id\": ").unwrap(); // killed while it was written
    let garbage = node.dir.path().join("sandboxes/igarbage");
    fs::create_dir_all(garbage.join("root/upper")).unwrap();
    node.restart(Signal::KILL);
    let (_, list) = node.call("GET", "/v1/sandboxes", &Value::Null);
    assert_eq!(list["sandboxes"].as_array().unwrap().len(), 1);
    assert_eq!(list["sandboxes"][0]["id"], stays.as_str());
    let ended: Vec<&Value> = list["ended"].as_array().unwrap().iter().collect();
    assert_eq!((ended.len(), &ended[0]["id"], &ended[0]["cause"]), (1, &json!(dies), &json!("lease_expired")));
    let left: Vec<_> =
        fs::read_dir(node.dir.path().join("sandboxes")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, [stays.as_str()]);
    for pid in pids {
        until("its processes are gone", || has_ended(pid));
    }
}

#[test]
fn another_boot_cleans_up() {
    let Some(mut node) = noded(&[]) else { return };
    let id = node.create(json!({}));
    let record = node.dir.path().join("sandboxes").join(&id).join("state.json");
    let pid = node.info(&id)["pid"].as_i64().unwrap();
    node.stop(Signal::KILL);
    let mut text: Value = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
    text["boot_id"] = "another".into();
    fs::write(&record, text.to_string()).unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid as i32).unwrap(), Signal::KILL).unwrap();
    node.restart(Signal::KILL);
    let (_, gone) = node.call("GET", &format!("/v1/sandboxes/{id}"), &Value::Null);
    assert_eq!(gone["details"]["cause"], "node_restarted");
}

#[test]
fn kept_sandboxes_are_found_again() {
    let Some(mut node) = noded(&[]) else { return };
    let id = node.create(json!({}));
    assert_eq!(node.call("POST", "/v1/shutdown", &json!({"keep_sandboxes": true})).0, 200);
    node.child.wait().unwrap();
    node.restart(Signal::KILL);
    assert_eq!(node.sh(&id, "echo here").0, "here");
}

#[test]
fn sandboxes_end_with_their_leases_when_noded_never_comes_back() {
    let Some(mut node) = noded(&[]) else { return };
    let short = node.create(json!({"lease": {"ttl_s": 1.0, "renew_on_use": true}}));
    let renewed = node.create(json!({"lease": {"ttl_s": 300.0, "renew_on_use": true}}));
    let long = node.create(json!({"lease": {"ttl_s": 300.0, "renew_on_use": true}}));
    assert_eq!(node.call("POST", &format!("/v1/sandboxes/{renewed}/lease"), &json!({"ttl_s": 1.2})).0, 200);
    let pids: Vec<u64> = [&short, &renewed].iter().map(|id| node.info(id)["pid"].as_u64().unwrap()).collect();
    std::thread::sleep(std::time::Duration::from_millis(100)); // their terms are on the way
    node.stop(Signal::KILL);
    for pid in pids {
        until("it ends by itself", || has_ended(pid));
    }
    node.restart(Signal::KILL);
    assert_eq!(node.sh(&long, "echo here").0, "here");
    // The next noded has tied it, too.
    assert_eq!(node.call("POST", &format!("/v1/sandboxes/{long}/lease"), &json!({"ttl_s": 1.0})).0, 200);
    let pid = node.info(&long)["pid"].as_u64().unwrap();
    until("its lease is kept for the next noded", || (node.kept_lease(&long)["ttl_s"] == json!(1.0)).then_some(()));
    node.stop(Signal::KILL);
    until("it ends by itself", || has_ended(pid));
    node.restart(Signal::KILL);
    let (_, gone) = node.call("GET", &format!("/v1/sandboxes/{long}"), &Value::Null);
    assert_eq!(gone["details"]["cause"], "lease_expired", "{gone}");
}
