//! The packet filter: one nftables table for each state directory, put in place in one transaction.

use std::{
    io::{self, Write as _},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use super::{
    plan::{Names, Range, PREFIX},
    Error,
};

/// How long `nft` may take.
const DEADLINE: Duration = Duration::from_secs(20);

/// What no sandbox may reach: this network, loopback, link-local (the metadata services of AWS, Google, Azure, Oracle and
/// others are at 169.254.169.254, .253 and 169.254.170.2), Alibaba's and Oracle's metadata, Azure's host agent,
/// multicast, reserved and broadcast addresses. IPv6 is dropped as a whole.
pub const FORBIDDEN: [&str; 8] = [
    "0.0.0.0/8",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "224.0.0.0/4",
    "240.0.0.0/4",
];

/// Puts the table in place, whatever stood there before.
pub fn apply(names: &Names, range: Range) -> Result<(), Error> {
    nft(&script(names, range))
}

/// Removes the table; nothing happens if there is none.
pub fn remove(names: &Names) -> Result<(), Error> {
    let table = names.table();
    nft(&format!("add table inet {table}\ndelete table inet {table}\n"))
}

fn script(names: &Names, range: Range) -> String {
    let (table, ours) = (names.table(), format!("{}*", names.prefix()));
    let (gateway, base) = (range.gateway(), range.base());
    let forbidden = FORBIDDEN.join(", ");
    // - guard: before anything else sees the packet. The reverse path check lets a sandbox send from its own address only,
    //   since the route to it is the one route over its interface.
    // - forward: `sm*` also keeps the sandboxes of other state directories apart.
    format!(
        r#"add table inet {table}
delete table inet {table}
table inet {table} {{
  chain guard {{
    type filter hook prerouting priority raw; policy accept;
    iifname != "{ours}" accept
    meta nfproto != ipv4 drop
    fib saddr . iif oif missing drop
    ip saddr {gateway} drop
    ip daddr {{ {forbidden} }} drop
  }}
  chain input {{
    type filter hook input priority filter; policy accept;
    iifname != "{ours}" accept
    ip daddr {gateway} udp dport 53 accept
    ip daddr {gateway} tcp dport 53 accept
    drop
  }}
  chain forward {{
    type filter hook forward priority filter; policy accept;
    iifname "{ours}" oifname "sm*" drop
    iifname "{ours}" accept
    oifname "{ours}" ct state established,related accept
    oifname "{ours}" drop
  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr {base}/{PREFIX} ip saddr != {gateway} oifname != "sm*" masquerade
  }}
}}
"#
    )
}

fn nft(script: &str) -> Result<(), Error> {
    let mut child = Command::new("nft")
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Error::NftMissing,
            _ => Error::Step { step: "start nft", source: error },
        })?;
    if let Some(mut stdin) = child.stdin.take() {
        // If nft died early, its exit says why.
        let _ = stdin.write_all(script.as_bytes());
    }
    let until = Instant::now() + DEADLINE;
    loop {
        match child.try_wait() {
            Ok(Some(_)) => break,
            Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(1)),
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(Error::Nft("it did not end in time".to_owned()));
            }
            Err(source) => return Err(Error::Step { step: "wait for nft", source }),
        }
    }
    let output = child.wait_with_output().map_err(|source| Error::Step { step: "read nft's messages", source })?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Error::Nft(said.lines().find(|line| !line.trim().is_empty()).unwrap_or("it failed").to_owned()))
}
