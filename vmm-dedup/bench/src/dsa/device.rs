//! The device that is measured: one of this machine, or the model with the latencies that are asked for.

use clap::Args;
use serde::Serialize;
use std::path::PathBuf;
use std::time::Duration;
use vmm_dedup::compare::Error;
use vmm_dedup_dsa::{DsaEngine, InProcess, Options, Reach, Wanted, WorkQueue};
use vmm_dedup_dsa_model::{Faults, Shape, Timing};
use vmm_dedup_host::{Failure, note};

/// What is to be measured.
#[derive(Args, Debug)]
pub(super) struct DeviceArgs {
    /// The work queue, such as /dev/dsa/wq0.0; without it all user queues, and the model where there are none.
    #[arg(long, value_name = "NODE", conflicts_with = "model")]
    node: Option<PathBuf>,
    /// Measure the model although there is a device.
    #[arg(long)]
    model: bool,
    /// The model's latency, ns.
    #[arg(long, default_value_t = Timing::PUBLISHED.latency_ns, value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    latency_ns: u64,
    /// The model's bandwidth, MB/s.
    #[arg(long, default_value_t = 31_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    bandwidth: u32,
    /// CPU time of a write to the model's portal, ns.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    portal_write_ns: u64,
}

/// What is measured, as the report names it.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub(super) enum Device {
    /// Work queues of this machine.
    Real {
        /// The node; all user queues without one.
        node: Option<PathBuf>,
    },
    /// The model. Its own work is no CPU time of the service; its latencies, and the CPU time of a portal write, are real
    /// time that the service waits.
    Modelled {
        /// From a submission to its record, besides the transfer, ns.
        latency_ns: u64,
        /// Bytes that the device reads in a second.
        bytes_per_s: u64,
        /// From a batch's beginning to its first member, ns.
        list_ns: u64,
        /// CPU time of a portal write, ns: assumed, since nobody has published it.
        portal_write_ns: u64,
    },
}

/// What is wrong with a device. An engine's error says besides that the CPU does the work, as in the service: not so here.
fn reason(error: Error) -> String {
    match error {
        Error::Device(text) => text,
        other => other.to_string(),
    }
}

/// How it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Each page is a descriptor of its own, and so many are on their way: with 1 each is waited for.
    Alone(usize),
    /// Pages in batches of so many, each of which is waited for.
    Whole(usize),
    /// Pages in batches of at most so many, as the driver thinks best.
    Batches(usize),
}

impl Device {
    /// Whether it reads pages by this process's addresses: a device through VFIO, which is named by its folder, does not.
    pub(super) fn uses_process_addresses(&self) -> bool {
        !matches!(self, Self::Real { node: Some(node) } if node.is_dir())
    }

    pub(super) fn of(args: &DeviceArgs) -> Result<Self, Failure> {
        let modelled = || Self::Modelled {
            latency_ns: args.latency_ns,
            bytes_per_s: u64::from(args.bandwidth) * 1_000_000,
            list_ns: Timing::PUBLISHED.list_ns,
            portal_write_ns: args.portal_write_ns,
        };
        if args.model {
            return Ok(modelled());
        }
        match (vmm_dedup_dsa::open(args.node.as_deref()), &args.node) {
            (Ok(_), node) => Ok(Self::Real { node: node.clone() }),
            (Err(error), Some(_)) => Err(Failure::missing(reason(error))),
            (Err(error), None) => {
                note!("{}: the model is measured", reason(error));
                Ok(modelled())
            }
        }
    }

    /// An engine on it. What it is asked goes to the device, also what the CPU would do sooner.
    pub(super) fn engine(&self, way: Way, hybrid: bool) -> Result<DsaEngine, Failure> {
        let options = Options {
            hybrid,
            only_if_sooner: false,
            ..Options::default()
        };
        let options = match way {
            Way::Alone(in_flight) => Options {
                batch: 1,
                in_flight,
                ..options
            },
            Way::Whole(batch) => Options {
                batch,
                in_flight: 1,
                ..options
            },
            Way::Batches(batch) => Options { batch, ..options },
        };
        DsaEngine::new(self.queues()?, options).map_err(|error| Failure::new(reason(error)))
    }

    fn queues(&self) -> Result<Vec<Box<dyn WorkQueue>>, Failure> {
        match self {
            Self::Real { node } => {
                vmm_dedup_dsa::open(node.as_deref()).map_err(|error| Failure::new(reason(error)))
            }
            Self::Modelled {
                latency_ns,
                bytes_per_s,
                list_ns,
                portal_write_ns,
            } => {
                let timing = Timing {
                    latency_ns: *latency_ns,
                    bytes_per_us: bytes_per_s / 1_000_000,
                    list_ns: *list_ns,
                    ..Timing::PUBLISHED
                };
                let shape = Shape::sapphire_rapids();
                let (faults, wanted) = (Faults::default(), Wanted::default());
                let queue = InProcess::new(shape, timing, faults, Reach::Process, wanted);
                let queue = queue.map_err(Failure::from_error)?;
                let portal_write = Duration::from_nanos(*portal_write_ns);
                Ok(vec![Box::new(queue.with_portal_write(portal_write))])
            }
        }
    }
}
