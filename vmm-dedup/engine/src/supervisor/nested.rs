//! Guests that run guests of their own.

use std::fs::read_to_string;

/// What KVM does with the memory of a guest that runs a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nesting {
    /// It does not let guests run guests, whatever their CPUID says.
    Off,
    /// It has pages pinned (kvm_vcpu_map), which no open file shows: since Linux 6.13.
    Pins,
    /// It has pages that nothing shows: before, it takes a plain reference, and the processor writes there (virtual APIC pages,
    /// posted interrupts) whatever becomes of the guest's mapping.
    Unseen,
}

/// KVM of this host.
pub(crate) fn here() -> Nesting {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let setting = |module: &str| read_to_string(format!("/sys/module/{module}/parameters/nested")).ok();
    of(&release, &[setting("kvm_intel"), setting("kvm_amd")])
}

fn of(release: &str, settings: &[Option<String>]) -> Nesting {
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(|n| n.parse().unwrap_or(0));
    let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let off = |setting: &String| matches!(setting.trim(), "N" | "0");
    // A module that does not serve this processor may be there as well, and what it is told says nothing of the other.
    let mut told = settings.iter().flatten().peekable();
    if told.peek().is_some() && told.all(off) {
        Nesting::Off
    } else if version >= (6, 13) {
        Nesting::Pins
    } else {
        Nesting::Unseen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_that_run_guests_need_a_kernel_that_pins_or_a_kvm_that_does_not_let_them() {
        let setting = |text: &str| Some(text.to_owned());
        let debian = "6.12.43+deb13-amd64";
        for (release, settings, expected) in [
            ("6.13.0", [setting("Y\n"), None], Nesting::Pins),
            ("7.0-rc1", [None, None], Nesting::Pins),
            ("6.13.0", [setting("N\n"), None], Nesting::Off),
            (debian, [setting("Y\n"), None], Nesting::Unseen),
            (debian, [None, setting("1\n")], Nesting::Unseen),
            (debian, [None, None], Nesting::Unseen),
            (debian, [setting("N\n"), None], Nesting::Off),
            (debian, [None, setting("0\n")], Nesting::Off),
            (debian, [setting("Y\n"), setting("0\n")], Nesting::Unseen),
            (debian, [setting("N\n"), setting("0\n")], Nesting::Off),
        ] {
            assert_eq!(of(release, &settings), expected, "{release} {settings:?}");
        }
    }
}
