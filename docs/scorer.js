// Of the search: an exact name of a setting, metric or preset comes first, names that contain the words after pages.
var Scorer = {
  score: ([, title, , , score, , kind]) =>
    kind === "object" && `/${title}`.endsWith(`/${new URLSearchParams(location.search).get("q").trim()}`) ? 100 : score,
  objNameMatch: 11,
  objPartialMatch: -1,
  objPrio: { 1: 5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
