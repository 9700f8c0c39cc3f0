//! `store`: the page store of a host (and trust domain).

use clap::Args;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use tokio::signal::unix::{SignalKind, signal};
use vmm_dedup_host::registry::{Access, Record, Registration};
use vmm_dedup_host::store::{
    DEFAULT_METRICS, DEFAULT_SOCKET, MAX_MIB, SOCKET_NAME, default_max_mib, parse_metrics,
};
use vmm_dedup_host::{Failure, memory, note, runtime, users};
use vmm_dedup_protocol::clock;

/// Run a page store: one per host and trust domain. VMs connect to its socket; it owns the shared pages.
#[derive(Args, Debug)]
pub(crate) struct StoreArgs {
    /// Unix socket to listen on [default: store.sock in the runtime folder, for root /run/vmm-dedup/store.sock]. Who may connect may share
    /// memory: give each trust domain its own.
    #[arg(long)]
    socket: Option<PathBuf>,
    /// Permissions of the socket, octal. Whoever may write to it may share memory, and only root and the store's user may set and explain.
    #[arg(long, value_name = "MODE", default_value = "0600", value_parser = parse_mode)]
    socket_mode: u32,
    /// Group of the socket, a name or a number [default: that of the process].
    #[arg(long, value_name = "GROUP", value_parser = users::group)]
    socket_group: Option<u32>,
    /// Who may connect, besides root and the store's own user: names or numbers of users, with commas between them [default: whoever may
    /// write to the socket]. Its permissions must let them in as well.
    #[arg(long, value_name = "USERS", value_delimiter = ',', value_parser = users::user)]
    join_user: Vec<u32>,
    /// Address of the HTTP server for Prometheus (GET /metrics), or "none".
    #[arg(long, default_value_t = Metrics(Some(DEFAULT_METRICS)), value_parser = |t: &str| parse_metrics(t).map(Metrics))]
    metrics: Metrics,
    /// Most memory for shared pages, MiB; auto: 65536, or five sixths of what its control group may have (memory.max) if that is less.
    #[arg(long, default_value = "auto", value_parser = parse_max_mib)]
    max_mib: MaxMib,
    /// Publish the pages in the order of their content, too, for VMs that search with an engine (PageForge).
    #[arg(long)]
    ordered: bool,
    /// Share securely, for tenants that are hostile to each other: what a guest can time does not tell whether others have its pages. Only
    /// idle pages take part, and whoever touches one waits for it. VMs that cannot do so are refused.
    #[arg(long)]
    secure: bool,
    /// Name of the trust domain, for logs and metrics.
    #[arg(long, default_value = "default")]
    domain: String,
}

/// Most memory for shared pages, if it was named.
#[derive(Clone, Copy, Debug)]
struct MaxMib(Option<u64>);

fn parse_max_mib(text: &str) -> Result<MaxMib, String> {
    match text.parse() {
        _ if text == "auto" => Ok(MaxMib(None)),
        Ok(mib) if MAX_MIB.contains(&mib) => Ok(MaxMib(Some(mib))),
        _ => {
            let (least, most) = MAX_MIB.into_inner();
            Err(format!("expected {least} to {most}, or auto"))
        }
    }
}

/// What a store may hold, MiB; says so if its control group would have it killed before.
fn max_mib(named: MaxMib) -> u64 {
    let limit = memory::limit();
    let MaxMib(Some(mib)) = named else {
        return default_max_mib(limit);
    };
    if let Some(limit) = limit.filter(|limit| limit >> 20 <= mib) {
        note!(
            "vmm-dedup: --max-mib {mib} is more than the control group of this store may have ({} MiB, memory.max): it would be killed \
             before it is full; lower it to {}, or raise that limit",
            limit >> 20,
            default_max_mib(Some(limit))
        );
    }
    mib
}

#[derive(Clone, Copy, Debug)]
struct Metrics(Option<SocketAddr>);

impl std::fmt::Display for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(address) => write!(f, "{address}"),
            None => f.write_str("none"),
        }
    }
}

fn parse_mode(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text, 8).map_err(|_| "expected permissions in octal, e.g. 0660".to_owned())
}

/// No core file has pages of guests or the domain's salt, and processes of the same user, such as VMMs, can neither trace the store nor
/// take its descriptors.
fn hide() {
    if let Err(e) = rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable) {
        log::warn!("processes of this user can look into the store: {e}");
    }
}

/// Runs a store until SIGINT, SIGTERM or SIGHUP; `announce`: says on standard error that it listens.
pub(crate) fn run(args: &StoreArgs, announce: bool) -> Result<(), Failure> {
    let socket = match &args.socket {
        Some(socket) => socket.clone(),
        None => runtime::folder()?.join(SOCKET_NAME),
    };
    let max_mib = max_mib(args.max_mib);
    let config = vmm_dedup_store::Config {
        socket: socket.clone(),
        mode: args.socket_mode,
        group: args.socket_group,
        join_users: args.join_user.clone(),
        metrics: args.metrics.0,
        max_bytes: max_mib << 20,
        domain: args.domain.clone(),
        ordered: args.ordered,
        secure: args.secure,
        ..vmm_dedup_store::Config::default()
    };
    let checked = config.validate().map_err(Failure::from_error);
    checked.map_err(|failure| Failure::usage(failure.to_string()))?;
    let folder = socket.parent().unwrap_or(Path::new("/"));
    if socket == Path::new(DEFAULT_SOCKET) || runtime::folder().is_ok_and(|own| own == folder) {
        fs::create_dir_all(folder).map_err(|e| {
            Failure::new(format!(
                "cannot create {} ({e}): choose a --socket",
                folder.display()
            ))
        })?;
    }
    hide();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(Failure::from_error)?;
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, async {
        // Before the socket exists, so that it is always removed.
        let mut terminate = signal(SignalKind::terminate()).map_err(Failure::from_error)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(Failure::from_error)?;
        let mut hangup = match hangup_is_ignored() {
            true => None,
            false => Some(signal(SignalKind::hangup()).map_err(Failure::from_error)?),
        };
        let hung_up = async move {
            match &mut hangup {
                Some(hangup) => drop(hangup.recv().await),
                None => std::future::pending().await,
            }
        };
        let store = vmm_dedup_store::Store::bind(config).map_err(Failure::from_error)?;
        // Until the store ends. Those that a command starts for itself are nobody else's.
        let _listed = announce
            .then(|| list(args, &socket, max_mib, store.metrics_address()))
            .flatten();
        if announce {
            let metrics = store
                .metrics_address()
                .map_or("no metrics".to_owned(), |address| {
                    format!("metrics at http://{address}/metrics")
                });
            note!("vmm-dedup: store listening on {}, {metrics}", socket.display());
        }
        let shutdown = async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
                () = hung_up => {}
            }
        };
        store.run(shutdown).await.map_err(Failure::from_error)
    })
}

/// Lists the store for commands that ask all stores of the host. It works without, for who names its socket.
fn list(args: &StoreArgs, socket: &Path, max_mib: u64, metrics: Option<SocketAddr>) -> Option<Registration> {
    let record = Record {
        socket: std::path::absolute(socket).unwrap_or_else(|_| socket.to_owned()),
        domain: args.domain.clone(),
        pid: std::process::id(),
        metrics,
        max_mib: Some(max_mib),
        ordered: args.ordered,
        secure: args.secure,
        access: Access {
            mode: args.socket_mode,
            group: args.socket_group,
            users: args.join_user.clone(),
        },
        started: clock::since_boot().as_secs(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let registered = Registration::new(&record);
    let unlisted = |e: &std::io::Error| {
        log::warn!("this store cannot be listed on this host ({e}): commands find it only by --store");
    };
    registered.inspect_err(unlisted).ok()
}

/// Whether this process was started to outlive its terminal (`nohup`).
fn hangup_is_ignored() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask & 1 << (libc::SIGHUP - 1) != 0)
}
