use serde_json::{json, Value};

use crate::bench::noded;

#[test]
fn memory() {
    let Some(node) = noded(&[]) else { return };
    let id = node.create(json!({"limits": {"memory_bytes": 128 << 20}}));
    if node.info(&id)["limits"]["enforced_by"]["memory"] == "none" {
        eprintln!("skipped: this machine has no memory controller");
        return;
    }
    assert_eq!(node.sh(&id, "cat /sys/fs/cgroup/memory.max").0, (128 << 20).to_string());
    let (_, result) = node.sh(&id, "exec /usr/bin/python3 -c 'bytearray(600 << 20)'");
    assert_eq!(result["reason"], "oom", "{result}");
    let (_, usage) = node.call("GET", &format!("/v1/sandboxes/{id}/usage"), &Value::Null);
    assert!(usage["oom_kills"].as_u64().unwrap() >= 1, "{usage}");
    assert!(usage["memory_peak_bytes"].as_u64().unwrap() > 100 << 20, "{usage}");
    node.delete(&id);
    // The group is used again: nothing of its past may show.
    let next = node.create(json!({"limits": {"memory_bytes": 256 << 20}}));
    let (_, usage) = node.call("GET", &format!("/v1/sandboxes/{next}/usage"), &Value::Null);
    assert_eq!(usage["oom_kills"], 0, "{usage}");
    assert!(usage["memory_peak_bytes"].as_u64().unwrap() < 64 << 20, "{usage}");
}

#[test]
fn processors_and_processes() {
    let Some(node) = noded(&[]) else { return };
    let id = node.create(json!({"limits": {"cpu": 1, "pids": 32}}));
    assert_eq!(node.sh(&id, "nproc; cat /sys/fs/cgroup/cpu.max /sys/fs/cgroup/pids.max").0, "1\n100000 100000\n32");
    if node.info(&id)["limits"]["enforced_by"]["pids"] != "none" {
        let forks = "import os, time\nfor _ in range(100):\n    if os.fork() == 0:\n        time.sleep(3)\n        os._exit(0)\n";
        let (_, result) = node.sh(&id, &format!("python3 -c '{forks}'"));
        assert!(result["stderr"] != "", "a hundred processes fit into 32: {result}");
        assert_eq!(node.sh(&id, "echo alive").0, "alive");
    }
}

#[test]
fn disks() {
    let Some(node) = noded(&[]) else { return };
    let id = node.create(json!({"limits": {"disk_bytes": 32 << 20}}));
    let enforcer = node.info(&id)["limits"]["enforced_by"]["disk"].as_str().unwrap().to_owned();
    assert!(["btrfs-qgroup", "tmpfs"].contains(&enforcer.as_str()), "{enforcer}");
    let (size, _) = node.sh(&id, "head -c 100000000 /dev/zero > /tmp/big 2>/dev/null; stat -c %s /tmp/big");
    assert!(size.parse::<u64>().unwrap() <= 34 << 20, "{size}");
    assert_eq!(node.sh(&id, "rm /tmp/big; echo ok > /tmp/again; cat /tmp/again").0, "ok");
    let few = node.create(json!({"limits": {"inodes": 500}}));
    let (count, _) = node
        .sh(&few, "mkdir /tmp/d; for i in $(seq 1000); do : > /tmp/d/$i || break; done 2>/dev/null; ls /tmp/d | wc -l");
    assert!((100..500).contains(&count.parse::<u64>().unwrap()), "{count}");
    for id in [id, few] {
        node.delete(&id);
    }
}
