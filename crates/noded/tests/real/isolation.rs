use std::fs;

use serde_json::json;

use crate::bench::noded;

#[test]
fn nothing_of_the_host() {
    let Some(node) = noded(&[]) else { return };
    let id = node.create(json!({}));
    let sh = |line: &str| node.sh(&id, line).0;
    for kind in ["user", "pid", "mnt", "net", "ipc", "uts", "cgroup"] {
        let host = fs::read_link(format!("/proc/self/ns/{kind}")).unwrap();
        assert_ne!(sh(&format!("readlink /proc/self/ns/{kind}")), host.to_string_lossy(), "{kind}");
    }
    let status = sh("cat /proc/self/status");
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
    for name in ["CapPrm:", "CapEff:", "CapBnd:"] {
        assert_eq!(field(name), "00000000a80425fb", "{name}");
    }
    assert_eq!(field("CapInh:"), "0000000000000000");
    assert_eq!(field("CapAmb:"), "0000000000000000");
    assert_eq!((field("NoNewPrivs:"), field("Seccomp:")), ("1".to_owned(), "2".to_owned()));
    let map = sh("cat /proc/self/uid_map");
    let map: Vec<u64> = map.split_ascii_whitespace().map(|word| word.parse().unwrap()).collect();
    assert!(map[0] == 0 && map[1] >= 0x4000_0000 && map[2] == 65536, "{map:?}");
    let mounts = sh("cat /proc/self/mountinfo");
    let host_dir = node.dir.path().to_string_lossy().into_owned();
    assert!(!mounts.contains("/dev/vda") && !mounts.contains(&host_dir), "{mounts}");
    assert_eq!(sh("ls /proc/self/fd | tr '\\n' ' '"), "0 1 2 3");
    assert_eq!(sh("cat /proc/self/cgroup | cut -d: -f3 | grep -v '^/$' | grep -v '^/c[0-9]*$'"), "");
    assert_eq!(sh("cat /proc/net/dev | tail -n +3 | cut -d: -f1 | tr -d ' '"), "lo");
    assert_eq!(sh("find /dev -type b | wc -l"), "0");
    assert_eq!(sh("stat -c %U:%a /dev/null /dev/shm /tmp | tr '\\n' ' '"), "root:666 root:1777 root:1777");
}

#[test]
fn what_docker_refuses_is_refused() {
    let Some(node) = noded(&[]) else { return };
    let id = node.create(json!({}));
    for line in [
        "mount -t tmpfs none /mnt",
        "umount /proc",
        "unshare -U true",
        "unshare -n true",
        "mknod /tmp/sda b 8 0",
        "echo 1 > /proc/sys/kernel/sysrq",
        "echo b > /proc/sysrq-trigger",
        "echo 100 > /proc/sys/user/max_user_namespaces",
        "hostname changed",
        "echo x > /dev/new",
        "echo x > /sys/fs/cgroup/memory.max",
        "cat /proc/1/environ",
        "head -c 1 /proc/kcore",
        "test -s /proc/keys",
    ] {
        let (_, result) = node.sh(&id, &format!("PATH=$PATH:/usr/sbin:/sbin; {line}"));
        assert_ne!(result["exit_code"], 0, "{line} worked");
    }
    assert_eq!(node.sh(&id, "kill -9 1; echo alive").0, "alive");
}

#[test]
fn etc_is_its_own() {
    let Some(node) = noded(&[]) else { return };
    let id = node.create(json!({"hostname": "box-7"}));
    assert_eq!(
        node.sh(&id, "hostname; cat /etc/hostname; getent hosts box-7 | tr -s ' '").0,
        "box-7\nbox-7\n127.0.1.1 box-7"
    );
    assert_eq!(node.sh(&id, "sed -i 's/box-7/box-8/' /etc/hosts && grep -c box-8 /etc/hosts").0, "1");
    // What is in root's home is the image's, never the host's.
    assert_eq!(node.sh(&id, "ls -A /root | grep -v -x -e .bashrc -e .profile").0, "");
}
