use std::{fs, time::Duration};

use serde_json::{json, Value};

use crate::bench::{groups_of, noded, spec, until};

#[test]
fn a_sandbox_comes_and_goes_without_a_trace() {
    let Some(node) = noded(&[]) else { return };
    let id = node.create(json!({}));
    assert_eq!(node.sh(&id, "echo hello").0, "hello");
    assert!(node.groups().iter().any(|group| group.ends_with(&id)));
    node.delete(&id);
    assert_eq!(fs::read_dir(node.dir.path().join("sandboxes")).unwrap().count(), 0);
    assert!(!node.groups().iter().any(|group| group.ends_with(&id)));
    let mounts = fs::read_to_string(format!("/proc/{}/mountinfo", node.child.id())).unwrap();
    assert!(!mounts.contains(&id), "{mounts}");
    let (status, gone) = node.call("GET", &format!("/v1/sandboxes/{id}"), &Value::Null);
    assert_eq!((status, gone["code"].as_str()), (410, Some("sandbox_gone")));
    assert_eq!(gone["details"]["cause"], "killed");
    assert_eq!(node.call("DELETE", "/v1/sandboxes/nobody", &Value::Null).0, 404);
}

#[test]
fn the_same_id_is_the_same_sandbox_and_never_a_new_one() {
    let Some(node) = noded(&[]) else { return };
    let spec = spec(json!({}));
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let calls: Vec<_> = (0..4).map(|_| scope.spawn(|| node.call("POST", "/v1/sandboxes", &spec).0)).collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    });
    assert_eq!(statuses.iter().filter(|status| **status == 201).count(), 1);
    assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 3);
    node.delete(spec["id"].as_str().unwrap());
    assert_eq!(node.call("POST", "/v1/sandboxes", &spec).0, 410);
}

#[test]
fn deleting_while_creating_leaves_nothing() {
    let Some(node) = noded(&["--max-starting", "1", "--max-warm", "0"]) else { return };
    let specs: Vec<Value> = (0..12).map(|_| spec(json!({}))).collect();
    std::thread::scope(|scope| {
        for spec in &specs {
            scope.spawn(|| node.call("POST", "/v1/sandboxes", spec));
        }
        std::thread::sleep(Duration::from_millis(15));
        for spec in &specs {
            node.call("DELETE", &format!("/v1/sandboxes/{}", spec["id"].as_str().unwrap()), &Value::Null);
        }
    });
    for spec in &specs {
        // Those whose create came after their delete.
        node.call("DELETE", &format!("/v1/sandboxes/{}", spec["id"].as_str().unwrap()), &Value::Null);
    }
    assert_eq!(fs::read_dir(node.dir.path().join("sandboxes")).unwrap().count(), 0);
    assert!(!node.groups().iter().any(|group| group.file_name().unwrap().to_string_lossy().starts_with('i')));
}

#[test]
fn leases_end_what_nobody_uses() {
    let Some(node) = noded(&[]) else { return };
    let idle = node.create(json!({"lease": {"ttl_s": 1.0, "renew_on_use": true}}));
    let used = node.create(json!({"lease": {"ttl_s": 1.5, "renew_on_use": true}}));
    let (_, next) = node.call("GET", "/v1/events", &Value::Null);
    for _ in 0..8 {
        node.sh(&used, "sleep 0.5");
    }
    node.info(&used);
    let (status, gone) = node.call("GET", &format!("/v1/sandboxes/{idle}"), &Value::Null);
    assert_eq!((status, gone["details"]["cause"].as_str()), (410, Some("lease_expired")));
    let (_, events) = node.call("GET", &format!("/v1/events?after={}&wait_s=5", next["next"]), &Value::Null);
    assert_eq!(events["events"][0]["sandbox"]["id"], idle.as_str());
    let renewed = node.call("POST", "/v1/leases", &json!({"renew": {&idle: 5.0, &used: 60.0}})).1;
    assert_eq!(renewed["gone"], json!([idle]));
}

#[test]
fn two_nodes_do_not_disturb_each_other_and_a_stopped_one_leaves_nothing() {
    let (Some(mut one), Some(two)) = (noded(&[]), noded(&[])) else { return };
    let (a, b) = (one.create(json!({})), two.create(json!({})));
    let node_id = one.call("GET", "/v1/health", &Value::Null).1["node_id"].as_str().unwrap().to_owned();
    one.stop(rustix::process::Signal::TERM);
    assert_eq!(groups_of(&node_id), Vec::<std::path::PathBuf>::new());
    assert!(!one.dir.path().join("noded.json").exists());
    assert!(!one.dir.path().join("sandboxes").join(a).exists());
    assert_eq!(two.sh(&b, "echo alive").0, "alive");
}

#[test]
fn an_ephemeral_node_takes_its_directory_along() {
    let Some(mut node) = noded(&["--ephemeral"]) else { return };
    node.create(json!({}));
    node.stop(rustix::process::Signal::TERM);
    until("the directory is gone", || (!node.dir.path().exists()).then_some(()));
}

#[test]
fn mistakes_are_named() {
    let Some(node) = noded(&[]) else { return };
    let (status, error) = node.call("POST", "/v1/sandboxes", &spec(json!({"image": "no-such-image"})));
    assert_eq!((status, error["code"].as_str()), (404, Some("image_not_found")));
    let (status, error) = node.call("POST", "/v1/sandboxes", &spec(json!({"limits": {"memory_bytes": 5}})));
    assert_eq!((status, error["code"].as_str()), (400, Some("invalid_argument")));
    let (status, error) = node.call("POST", "/v1/sandboxes", &spec(json!({"privileged": true})));
    assert_eq!((status, error["code"].as_str()), (400, Some("invalid_argument")));
    assert_eq!(node.call("GET", "/v1/nothing", &Value::Null).1["code"], "unknown_call");
}
