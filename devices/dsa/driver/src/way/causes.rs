//! What is said of errors.

/// What an error says, and what its causes say, if it does not say that itself: for those who see nothing but the text.
pub(crate) fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let why = error.to_string();
        if !text.contains(&why) {
            text = format!("{text}: {why}");
        }
        cause = error.source();
    }
    text
}
