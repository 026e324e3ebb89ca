//! The kernel's switches for interfaces. Forwarding is switched on for single interfaces (ours, and those that answers come
//! in by), never for the host as a whole, and off again when the last network of ours is gone.

use std::{fs, io};

use super::plan::RouteLine;

fn forwarding(interface: &str) -> String {
    // A dot in a name (VLANs) is a slash in the path's form with dots only; as a path it stays as it is.
    format!("/proc/sys/net/ipv4/conf/{interface}/forwarding")
}

fn is_on(path: &str) -> io::Result<bool> {
    Ok(fs::read_to_string(path)?.trim() != "0")
}

/// Lets packets that come in by the routed interfaces of the host pass on; which of them had to be switched.
pub fn switch_on(routes: &[RouteLine]) -> io::Result<Vec<String>> {
    let mut switched: Vec<String> = Vec::new();
    for route in routes.iter().filter(|route| !route.interface.starts_with("sm")) {
        if !is_on(&forwarding(&route.interface))? {
            switch_on_one(&route.interface)?;
            switched.push(route.interface.clone());
        }
    }
    Ok(switched)
}

pub fn switch_on_one(interface: &str) -> io::Result<()> {
    fs::write(forwarding(interface), "1")
}

/// Switches off what [`switch_on`] did, unless the host has become a router by other means meanwhile.
pub fn switch_off(interfaces: &[String]) {
    if is_on("/proc/sys/net/ipv4/ip_forward").unwrap_or(true) {
        return;
    }
    for interface in interfaces {
        // An interface that is gone needs nothing.
        let _ = fs::write(forwarding(interface), "0");
    }
}

/// Keeps the kernel from giving an interface a link-local address. The packet filter drops IPv6 in any case, and a kernel
/// without IPv6 has no such switch: so a failure is none.
pub fn no_ipv6(interface: &str) {
    let _ = fs::write(format!("/proc/sys/net/ipv6/conf/{interface}/disable_ipv6"), "1");
}
