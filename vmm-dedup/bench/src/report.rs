//! What all reports do: medians of measurements, and JSON.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use vmm_dedup_host::{Failure, say};

/// Of each figure the median (of an even number the lower one, so that counts stay counts). A figure that is missing (null) in
/// some of them counts as larger than any: what did not happen took longer than what did.
pub(crate) fn median<T: Serialize + DeserializeOwned + Clone>(measurements: &[&T]) -> T {
    let values: Vec<Value> = measurements
        .iter()
        .filter_map(|m| serde_json::to_value(m).ok())
        .collect();
    serde_json::from_value(median_value(&values)).unwrap_or_else(|_| measurements[0].clone())
}

fn median_value(values: &[Value]) -> Value {
    match &values[0] {
        Value::Object(fields) => fields
            .keys()
            .map(|key| {
                let field: Vec<Value> = values.iter().filter_map(|v| v.get(key).cloned()).collect();
                (key.clone(), median_value(&field))
            })
            .collect(),
        first => {
            let number = |v: &Value| v.as_f64().unwrap_or(f64::INFINITY);
            let mut figures: Vec<&Value> = values.iter().filter(|v| v.is_number() || v.is_null()).collect();
            figures.sort_by(|a, b| number(a).total_cmp(&number(b)));
            let middle = figures.len().saturating_sub(1) / 2;
            figures
                .get(middle)
                .map_or_else(|| first.clone(), |v| (*v).clone())
        }
    }
}

/// Prints a report as JSON.
pub(crate) fn print_json(report: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(report).map_err(Failure::from_error)?;
    say!("{text}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn of_each_figure_the_median_is_taken_and_what_is_missing_is_the_largest() {
        let runs = [
            json!({ "name": "a", "count": 3, "times": { "first": 1.5, "second": null } }),
            json!({ "name": "a", "count": 1, "times": { "first": null, "second": 4.0 } }),
            json!({ "name": "a", "count": 2, "times": { "first": 0.5, "second": null } }),
        ];
        let median = median(&runs.iter().collect::<Vec<_>>());
        assert_eq!(
            median,
            json!({ "name": "a", "count": 2, "times": { "first": 1.5, "second": null } })
        );
        assert_eq!(median_value(&[json!(4), json!(1)]), json!(1));
    }
}
