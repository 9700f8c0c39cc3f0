//! What `smartmd` reaches of the other policies.

use super::measured::Measured;
use serde::Serialize;
use vmm_dedup_host::say;

/// Speeds that differ by less count as equal.
const EQUAL_SPEED: f64 = 0.01;

/// `smartmd` divided by another policy: medians of the rounds' ratios.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(super) struct Ratios {
    /// Speed, of that without dedup.
    speed_of_none: Option<f64>,
    /// After churn.
    speed_of_none_after_churn: Option<f64>,
    saving_of_ksm_after_churn: Option<f64>,
    /// Of pages that guests work on.
    guests_speed_of_none: Option<f64>,
    /// Speed, by CPU time and by the clock.
    speed_of_no_splitting: Option<f64>,
    rate_of_no_splitting: Option<f64>,
    saving_of_ksm: Option<f64>,
    cpu_of_ksm: Option<f64>,
    guests_saving_of_ksm: Option<f64>,
    /// With each threshold of `ingens`.
    ingens: Vec<Ingens>,
    /// Of those that are not slower, the least: what `smartmd` saves more at equal speed.
    saving_of_ingens_at_equal_speed: Option<f64>,
}

/// `smartmd` divided by `ingens`.
#[derive(Debug, PartialEq, Serialize)]
struct Ingens {
    policy: String,
    speed: f64,
    saving: f64,
}

impl Ratios {
    pub(super) fn of(rounds: &[Measured]) -> Self {
        let to = |other: &str, figure: &dyn Fn(&Measured) -> Option<f64>| {
            let find = |name: &str, round| rounds.iter().find(|m| m.policy == name && m.round == round);
            let mut ratios: Vec<f64> = rounds
                .iter()
                .filter(|m| m.policy == other)
                .filter_map(|m| Some(figure(find("smartmd", m.round)?)? / figure(m)?))
                .filter(|ratio| ratio.is_finite())
                .collect();
            ratios.sort_unstable_by(f64::total_cmp);
            ratios.get(ratios.len().saturating_sub(1) / 2).copied()
        };
        let speed = |m: &Measured| Some(m.process.speed());
        let saving = |m: &Measured| Some(m.process.saved_pages as f64);
        let mut names: Vec<&str> = rounds.iter().map(|m| m.policy.as_str()).collect();
        names.retain(|name| name.starts_with("ingens"));
        names.sort_unstable();
        names.dedup();
        let ingens: Vec<Ingens> = names
            .into_iter()
            .filter_map(|name| {
                Some(Ingens {
                    policy: name.to_owned(),
                    speed: to(name, &speed)?,
                    saving: to(name, &saving)?,
                })
            })
            .collect();
        let not_slower = ingens.iter().filter(|i| i.speed <= 1.0 + EQUAL_SPEED);
        Self {
            speed_of_none: to("none", &speed),
            speed_of_none_after_churn: to("none", &|m| m.process.speed_after_churn()),
            saving_of_ksm_after_churn: to("ksm", &|m| Some(m.process.churned.as_ref()?.saved_pages as f64)),
            guests_speed_of_none: to("none", &|m| Some(m.guests.as_ref()?.pages_per_cpu_s)),
            speed_of_no_splitting: to("no-splitting", &speed),
            rate_of_no_splitting: to("no-splitting", &|m| Some(m.process.rate())),
            saving_of_ksm: to("ksm", &saving),
            cpu_of_ksm: to("ksm", &|m| Some(m.process.cpu_s())),
            guests_saving_of_ksm: to("ksm", &|m| Some(m.guests.as_ref()?.saved_pages as f64)),
            saving_of_ingens_at_equal_speed: not_slower.map(|i| i.saving).min_by(f64::total_cmp),
            ingens,
        }
    }

    pub(super) fn print(&self) {
        let of = |what: &str, ratio: Option<f64>| {
            if let Some(ratio) = ratio {
                say!("  {ratio:>6.3}  {what}");
            }
        };
        say!("smartmd divided by others, medians of the rounds:");
        of("speed without dedup", self.speed_of_none);
        of("speed without dedup, after churn", self.speed_of_none_after_churn);
        of("saving of ksm, after churn", self.saving_of_ksm_after_churn);
        of("speed without dedup, guests", self.guests_speed_of_none);
        of("speed of no-splitting", self.speed_of_no_splitting);
        of("speed of no-splitting, by the clock", self.rate_of_no_splitting);
        of("saving of ksm", self.saving_of_ksm);
        of("saving of ksm, guests", self.guests_saving_of_ksm);
        of("CPU time of ksm", self.cpu_of_ksm);
        for ingens in &self.ingens {
            of(&format!("speed of {}", ingens.policy), Some(ingens.speed));
            of(&format!("saving of {}", ingens.policy), Some(ingens.saving));
        }
        of(
            "saving of ingens at equal speed",
            self.saving_of_ingens_at_equal_speed,
        );
    }
}
