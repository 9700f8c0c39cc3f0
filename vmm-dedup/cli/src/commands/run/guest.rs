//! What `run` boots: a kernel, or the built-in test guest if this command has it (the feature `demo`).

use super::console::Listener;
use clap::Args;
use std::path::PathBuf;
use vmm_dedup_host::Failure;
use vmm_dedup_refvmm::Image;

/// A kernel with its command line.
#[cfg(not(feature = "demo"))]
#[derive(Args, Debug)]
pub(crate) struct Guest {
    /// Linux kernel or PVH image.
    #[arg(long)]
    kernel: PathBuf,
    /// Kernel command line.
    #[arg(long, default_value = "console=ttyS0")]
    cmdline: String,
}

#[cfg(not(feature = "demo"))]
impl Guest {
    /// The image and its command line.
    pub(super) fn boot(&self) -> (Image, String) {
        (Image::Path(self.kernel.clone()), self.cmdline.clone())
    }

    /// What the guest says of itself is for people.
    pub(super) fn listen(&self) -> (Option<Listener>, Verdict) {
        (None, Verdict)
    }
}

/// Says nothing.
#[cfg(not(feature = "demo"))]
pub(super) struct Verdict;

#[cfg(not(feature = "demo"))]
impl Verdict {
    #[allow(clippy::unused_self)]
    pub(super) fn check(&self) -> Result<(), Failure> {
        Ok(())
    }
}

/// A kernel with its command line, or the built-in test guest.
#[cfg(feature = "demo")]
#[derive(Args, Debug)]
pub(crate) struct Guest {
    /// Linux kernel or PVH image.
    #[arg(long, conflicts_with = "payload", required_unless_present = "payload")]
    kernel: Option<PathBuf>,
    /// Run the built-in test guest with these parameters, e.g. "private_mib=16 seconds=10". It fails unless the guest finds
    /// all of its memory right.
    #[arg(long, value_name = "PARAMETERS", num_args = 0..=1, default_missing_value = "")]
    payload: Option<String>,
    /// Kernel command line.
    #[arg(long, default_value = "console=ttyS0", conflicts_with = "payload")]
    cmdline: String,
}

#[cfg(feature = "demo")]
impl Guest {
    /// The image and its command line.
    pub(super) fn boot(&self) -> (Image, String) {
        if let Some(path) = &self.kernel {
            return (Image::Path(path.clone()), self.cmdline.clone());
        }
        // The guest measures time by its TSC, whose frequency KVM knows only once there is a vCPU.
        let khz = vmm_dedup_payload::measure_tsc_khz();
        let parameters = self.payload.as_deref().unwrap_or_default();
        let cmdline = format!("{parameters} tsc_khz={khz}").trim().to_owned();
        (Image::Bytes(vmm_dedup_payload::ELF), cmdline)
    }

    /// Who hears what the test guest says of itself, and what it comes to.
    pub(super) fn listen(&self) -> (Option<Listener>, Verdict) {
        let verdict = Verdict(self.payload.as_ref().map(|_| Said::default()));
        let said = verdict.0.clone();
        let listener = said.map(|said| -> Listener { Box::new(move |line| hear(&said, line)) });
        (listener, verdict)
    }
}

/// What the test guest reports at its end: `Err` says what is wrong.
#[cfg(feature = "demo")]
type Said = std::sync::Arc<std::sync::Mutex<Option<Result<(), String>>>>;

/// What the test guest, if there is one, found.
#[cfg(feature = "demo")]
pub(super) struct Verdict(Option<Said>);

#[cfg(feature = "demo")]
fn hear(said: &Said, line: &str) {
    use vmm_dedup_payload::Report;
    let verdict = match Report::parse(line) {
        Ok(Some(Report::Done { ok: true })) => Ok(()),
        Ok(Some(Report::Done { ok: false })) => Err("the test guest found wrong bytes in its memory".into()),
        Ok(Some(Report::Fail { reason })) => Err(format!("the test guest gave up: {reason}")),
        _ => return,
    };
    // The first says most: a guest that gives up also ends without success.
    said.lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
        .get_or_insert(verdict);
}

#[cfg(feature = "demo")]
impl Verdict {
    /// Fails unless the guest has said that all is well.
    pub(super) fn check(&self) -> Result<(), Failure> {
        let Some(said) = &self.0 else { return Ok(()) };
        let said = said.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let unsaid = || Err("the test guest ended without a verdict".into());
        said.clone().unwrap_or_else(unsaid).map_err(Failure::new)
    }
}
