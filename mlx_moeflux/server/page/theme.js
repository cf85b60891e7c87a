// Not a module, so that it runs before the first picture: the page never flashes in the wrong theme.
document.documentElement.dataset.theme = localStorage.getItem("theme") ?? "auto";
